"""The machine's setting is raised once and put back once."""

from pathlib import Path

from stepcluster.limits import WANTED, raise_limits, restore_limits


def test_what_the_first_cluster_found_is_what_the_last_one_leaves(tmp_path: Path) -> None:
    setting = tmp_path / "max_user_instances"
    setting.write_text("128\n")
    raise_limits(tmp_path, setting)
    raise_limits(tmp_path, setting)
    assert int(setting.read_text()) == WANTED
    restore_limits(tmp_path, setting)
    assert int(setting.read_text()) == 128
    assert list(tmp_path.iterdir()) == [setting]


def test_a_setting_that_is_high_enough_or_was_changed_since_is_left_alone(tmp_path: Path) -> None:
    setting = tmp_path / "max_user_instances"
    setting.write_text("8192")
    raise_limits(tmp_path, setting)
    assert list(tmp_path.iterdir()) == [setting]
    setting.write_text("128")
    raise_limits(tmp_path, setting)
    setting.write_text("4096")
    restore_limits(tmp_path, setting)
    assert setting.read_text() == "4096"
