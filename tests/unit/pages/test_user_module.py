"""A page of the user's in any encoding."""

from rlhf_spmd.pages.user_module import load_module


def test_a_page_in_another_encoding_is_kept_as_utf8(tmp_path):
    page = tmp_path / "page.py"
    page.write_bytes('# A page.\n# -*- coding: latin-1 -*-\nTEXT = "für"\n'.encode("latin-1"))
    module, source = load_module("strategy", str(page), "rlhf_spmd.strategies", [])
    assert module.TEXT == "für"
    copy = tmp_path / "copy.py"
    copy.write_text(source, encoding="utf-8")
    again, kept = load_module("strategy", str(copy), "rlhf_spmd.strategies", [])
    assert again.TEXT == "für" and kept == source
