"""The newest whole checkpoint of a run folder."""

from rlhf_spmd.runtime.failure.last_checkpoint import newest_checkpoint, resume_hint


def test_the_newest_whole_checkpoint(tmp_path):
    assert newest_checkpoint(tmp_path) is None
    assert "There is no complete checkpoint" in resume_hint(str(tmp_path), 4) and resume_hint("", 4) == ""
    for number, whole in ((2, True), (10, True), (12, False)):
        (tmp_path / "checkpoints" / f"iteration-{number:06d}").mkdir(parents=True)
        if whole:
            (tmp_path / "checkpoints" / f"iteration-{number:06d}" / "manifest.json").write_text("{}", encoding="utf-8")
    assert newest_checkpoint(tmp_path).name == "iteration-000010"
    (tmp_path / "checkpoints" / "iteration-000011.bad").mkdir()  # set aside by its owner
    (tmp_path / "checkpoints" / "iteration-000011.bad" / "manifest.json").write_text("{}", encoding="utf-8")
    assert newest_checkpoint(tmp_path).name == "iteration-000010"
    text = resume_hint(str(tmp_path), 4)
    assert "iteration-000010; resume with: mpirun -n 4 python -m rlhf_spmd train --resume" in text
    (tmp_path / "my run").mkdir()
    (tmp_path / "checkpoints").rename(tmp_path / "my run" / "checkpoints")
    assert resume_hint(str(tmp_path / "my run"), 1).endswith(f"train --resume '{tmp_path}/my run'")
