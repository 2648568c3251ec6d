"""Options that make no sense are one line; tests/test_bad_input.py draws more of them."""

import pytest

from bench.validation import command


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("replay nothing", "nothing"),
        ("disturbances --kinds noise", "kind 'noise' is unknown"),
        ("disturbances --framework jax", "framework 'jax' is unknown"),
        ("disturbances --runs 0", "1 or more"),
        ("disturbances --framework pt --publish", "--publish needs both frameworks"),
        ("disturbances --minutes nan", "--minutes: give more than 0, not nan"),
        ("leaks --processes 0", "1 or more"),
        ("leaks --framework jax", "framework 'jax' is unknown"),
        ("leaks --framework pt --publish", "--publish needs both frameworks"),
        ("overhead --only none", "technique 'none' has no row"),
        ("overhead --processes 1", "--processes: give 2 or more, not 1"),
        ("mutations --only nosuch", "no fault has"),
        ("mutations --minutes 0", "--minutes: give more than 0, not 0"),
        ("mutations --drawn 0", "1 or more"),
        ("mutations --only interval --publish", "leave out --only"),
        ("mutations --drawn 3 --of nowhere", "--of: 'nowhere' is unknown"),
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
    assert "has a damaged validation.json" in capsys.readouterr().err
