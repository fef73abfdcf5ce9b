"""Journals of many hosts in one file, there and back."""

import gzip
import json
import tarfile
from pathlib import Path

import pytest

from phasesync.errors import LogError
from phasesync.logs import PACKED, collect
from phasesync.report.audit import audit_paths
from tests.audit.test_fuzz import made


@pytest.mark.parametrize("suffix", PACKED)
def test_a_pack_is_audited_like_its_folder(tmp_path: Path, suffix: str) -> None:
    if suffix.endswith(".zst"):
        pytest.importorskip("zstandard")
    made(tmp_path / "run")
    out = tmp_path / f"run{suffix}"
    manifest = collect(tmp_path / "run", out)
    assert {host: each["files"] for host, each in manifest["hosts"].items()} == {
        "host0": 2,
        "host1": 2,
    }
    assert len(manifest["files"]) == 4
    assert audit_paths([out])[0].verdict == "ok"


def test_a_pack_of_one_host_says_who_is_missing(tmp_path: Path) -> None:
    for path in made(tmp_path / "run")[2:]:
        path.unlink()
    collect(tmp_path / "run", tmp_path / "run.pack.tar.gz")
    answer = audit_paths([tmp_path / "run.pack.tar.gz"])[0]
    assert (answer.verdict, answer.rule) == ("inconclusive", "R-DUMPSET")


def test_packs_of_two_hosts_are_one_run(tmp_path: Path) -> None:
    files = made(tmp_path / "run")
    for number, part in enumerate((files[:2], files[2:])):
        folder = tmp_path / f"host{number}"
        folder.mkdir()
        for path in part:
            path.rename(folder / path.name)
        collect(folder, tmp_path / f"{number}.pack.tar")
    answers = audit_paths([tmp_path / "0.pack.tar", tmp_path / "1.pack.tar"])
    assert [answer.verdict for answer in answers] == ["ok"]


def test_a_pack_cannot_write_elsewhere(tmp_path: Path) -> None:
    out = tmp_path / "bad.pack.tar"
    (tmp_path / "x").write_text("{}")
    with tarfile.open(out, "w") as pack:
        pack.add(tmp_path / "x", arcname="../../escaped.jsonl")
    with pytest.raises(LogError, match="not a whole pack"):
        audit_paths([out])
    assert not (tmp_path.parent / "escaped.jsonl").exists()


@pytest.mark.parametrize("raw", [b"", b"\x1f\x8b torn", gzip.compress(b"no tar", mtime=0)])
def test_what_is_no_pack_is_one_line(tmp_path: Path, raw: bytes) -> None:
    out = tmp_path / "bad.pack.tar.gz"
    out.write_bytes(raw)
    with pytest.raises(LogError, match="not a whole pack"):
        audit_paths([out])


def test_compressed_journals_are_read(tmp_path: Path) -> None:
    for path in made(tmp_path / "run"):
        (path.with_name(path.name + ".gz")).write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    assert audit_paths([tmp_path / "run"])[0].verdict == "ok"


def test_a_newer_journal_is_refused_by_name(tmp_path: Path) -> None:
    path = made(tmp_path / "run")[0]
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps({**line, "journal": 2}) + "\n" for line in lines))
    with pytest.raises(LogError, match="journal format 2; this phasesync reads up to 1"):
        audit_paths([tmp_path / "run"])


def test_lines_of_a_pack_are_called_by_the_pack(tmp_path: Path) -> None:
    made(tmp_path / "run")[1].unlink()
    out = tmp_path / "run.pack.tar"
    collect(tmp_path / "run", out)
    (answer,) = audit_paths([out])
    assert answer.verdict == "inconclusive"
    assert all(line.file.startswith(f"{out}!/") for line in answer.evidence)
