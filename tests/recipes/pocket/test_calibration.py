"""The pocket model's text to calibrate on."""

from onebox.pocket.ready import MODEL_DIRECTORY
from onebox.quantize.documents import index_files
from onebox.quantize.settings import CalibrationSettings
from onebox.text.tokenizer import Tokenizer
from recipes.pocket.calibration import main


def test_the_text_is_what_quantize_reads_and_the_same_every_time(tmp_path):
    files = [tmp_path / "one.jsonl", tmp_path / "same.jsonl"]
    for file in files:
        assert main(["--data", str(tmp_path / "none"), "text", str(file), "--examples", "12"]) == 0
    assert files[0].read_bytes() == files[1].read_bytes()
    tokenizer = Tokenizer.load(MODEL_DIRECTORY)
    found = index_files(files[:1]).tokens(tokenizer, None, CalibrationSettings(2, 64, num_held_out=1)).token_ids
    assert found.shape == (3, 64)
    (message_end,) = tokenizer.encode("<|im_end|>")
    assert message_end in found


def test_a_build_without_a_name_and_an_unknown_workload_are_refused(capsys):
    assert main(["compare", "directory"]) == 2
    assert main(["compare", "a=b", "--workloads", "poetry"]) == 2
    told = capsys.readouterr().err
    assert "directory is not NAME=DIR." in told
    assert "poetry is no workload" in told
