"""Options that make no sense are one line; tests/test_bad_input.py draws more of them."""

import pytest

from bench.validation import command


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("replay nothing", "nothing"),
        ("disturbances --kinds noise", "no kind 'noise'"),
        ("disturbances --framework jax", "no framework 'jax'"),
        ("disturbances --runs 0", "1 or more"),
        ("disturbances --framework pt --publish", "--publish is of both frameworks"),
        ("disturbances --minutes nan", "a time above 0"),
        ("leaks --processes 0", "1 or more"),
        ("leaks --framework jax", "no framework 'jax'"),
        ("leaks --framework pt --publish", "--publish is of both frameworks"),
        ("overhead --only none", "'none' is no technique"),
        ("overhead --processes 1", "takes 2 or more"),
        ("mutations --only nosuch", "no fault has"),
        ("mutations --minutes 0", "a time above 0"),
        ("mutations --drawn 0", "1 or more"),
        ("mutations --only interval --publish", "leave --only away"),
        ("mutations --drawn 3 --of nowhere", "no tests of 'nowhere'"),
    ],
)
def test_an_option_that_makes_no_sense_is_one_line(arguments, reason, capsys):
    with pytest.raises(SystemExit, match="2"):
        command.main(arguments.split())
    assert reason in capsys.readouterr().err.splitlines()[-1]


def test_a_damaged_measurement_is_not_taken_up(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    cut = '{"matches": [{"framework": "pt", "workload": "small"}'
    (tmp_path / "validation.json").write_text(cut)
    with pytest.raises(SystemExit, match="2"):
        command.main(["measure", "--resume", "."])
    assert "holds a damaged validation.json" in capsys.readouterr().err
