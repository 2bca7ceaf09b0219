"""/tokenize and /detokenize."""

from tests.server.test_errors import refused


def test_tokenize_and_detokenize_have_vllms_shapes_and_undo_each_other(scripted):
    client = scripted("ok")
    text = "héllo<|im_end|>"
    body = client.request("POST", "/tokenize", json_body={"prompt": text, "return_token_strs": True}).json()
    assert body == {
        "count": 7,
        "max_model_len": 400,
        "tokens": list(client.service.tokenizer.encode(text)),
        "token_strs": ["h", "bytes:\\xc3", "bytes:\\xa9", "l", "l", "o", "<|im_end|>"],
    }
    undone = client.request("POST", "/detokenize", json_body={"tokens": body["tokens"]}).json()
    assert undone == {"prompt": text}


def test_tokenize_of_a_conversation_is_the_prompt_of_its_answer(scripted):
    client = scripted("ok")
    conversation = {
        "messages": [{"role": "user", "content": "Hi"}],
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "chat_template_kwargs": {"enable_thinking": False},
    }
    body = client.request("POST", "/tokenize", json_body=conversation).json()
    answer = client.chat(**conversation, return_token_ids=True).json()
    assert (body["tokens"], body["token_strs"]) == (answer["prompt_token_ids"], None)


def test_ids_beyond_the_vocabulary_are_refused_with_the_last_one(scripted):
    client = scripted("ok")
    last = client.service.engine.vocab_size - 1
    response = client.request("POST", "/detokenize", json_body={"tokens": [last]})
    assert response.status_code == 200, response.text
    response = client.request("POST", "/detokenize", json_body={"tokens": [1, last + 1]})
    assert f"holds the id {last + 1}; the vocabulary's ids go from 0 to {last}" in refused(response, 400, "tokens")
