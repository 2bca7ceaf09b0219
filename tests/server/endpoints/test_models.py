"""/v1/models, /health and /version."""

from onebox import __version__


def test_models_health_and_version(scripted):
    client = scripted("ok")
    (model,) = client.request("GET", "/v1/models").json()["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("tiny", "model", 400)
    assert model["fingerprint"] == client.service.fingerprint
    assert client.request("GET", "/v1/models/tiny").json() == model
    assert client.request("GET", "/version").json() == {"version": __version__}
    assert client.request("GET", "/health").json() == {
        "status": "ok",
        "message": "The engine runs.",
        "num_restarts": 0,
    }
    # As monitors ask.
    assert client.request("HEAD", "/health").status_code == 200
    client.service.engine.close()
    assert client.request("GET", "/health").status_code == 503
    assert client.request("HEAD", "/health").status_code == 503
