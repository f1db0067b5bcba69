"""Where the machines of a run meet, by the environment."""

import pytest

from qerl.host.nodes import Meeting, by_torchrun, check_torchrun, is_first, meeting, node_number, own_lock
from qerl.settings.base import ConfigError

SLURM = {"SLURM_LAUNCH_NODE_IPADDR": "10.0.0.7", "SLURM_NODEID": "1", "SLURM_JOB_ID": "5123"}
TORCHRUN = {"TORCHELASTIC_RUN_ID": "x", "RANK": "3", "WORLD_SIZE": "4", "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2"}


def test_variables_or_slurm_say_where_machines_meet():
    given = {"MASTER_ADDR": "a", "NODE_RANK": "1"}
    assert meeting(2, given) == Meeting(1, "a", 29400)
    assert meeting(2, {**given, "MASTER_PORT": "1234"}) == Meeting(1, "a", 1234)
    assert meeting(2, SLURM) == Meeting(1, "10.0.0.7", 29523)
    assert meeting(2, {**SLURM, **given, "NODE_RANK": "0"}) == Meeting(0, "a", 29523)


@pytest.mark.parametrize("environment", [{}, {"MASTER_ADDR": "a"}, {"NODE_RANK": "0"}])
def test_without_them_one_sentence_says_what_to_set(environment):
    with pytest.raises(ConfigError, match=r"nodes=2 needs MASTER_ADDR .* and NODE_RANK \(0 to 1\)"):
        meeting(2, environment)


def test_a_number_beyond_the_machines_is_an_error():
    with pytest.raises(ConfigError, match="NODE_RANK=2 is no machine of nodes=2"):
        meeting(2, {"MASTER_ADDR": "a", "NODE_RANK": "2"})


def test_torchrun_must_start_what_the_settings_say():
    assert by_torchrun(TORCHRUN)
    assert not by_torchrun(SLURM)
    check_torchrun(4, 2, TORCHRUN)
    for processes, nodes in ((4, 1), (8, 2), (1, 1)):
        with pytest.raises(ConfigError, match="torchrun started 4 processes on 2 machines, and the settings say"):
            check_torchrun(processes, nodes, TORCHRUN)


def test_one_process_answers_for_the_files_and_each_has_its_lock():
    assert (node_number({}), is_first(1, {}), own_lock(1, {})) == (0, True, "lock")
    assert (is_first(2, SLURM), own_lock(2, SLURM)) == (False, "lock-1")
    assert (is_first(2, {"NODE_RANK": "0"}), own_lock(2, {"NODE_RANK": "0"})) == (True, "lock-0")
    assert (node_number(TORCHRUN), is_first(2, TORCHRUN), own_lock(2, TORCHRUN)) == (1, False, "lock-3")
    assert is_first(2, {**TORCHRUN, "RANK": "0"})
    # A job of SLURM with one machine is like any other.
    assert (is_first(1, SLURM), own_lock(1, SLURM)) == (True, "lock")
