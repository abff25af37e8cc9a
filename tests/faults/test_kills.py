"""SIGKILL at random moments: every stage, resumed, ends with the payload of the undisturbed run.

`make long` kills one stage with ranks and one with servers, and the others at a sample of their operations
(test_crash_points.py); `make soak` kills every stage, and prints the table of docs/faults.md.
"""

import pytest

from tests.evaluation.rows import counted
from tests.faults.harness import Undisturbed, finish, kill_once
from tests.faults.stages import STAGES

pytestmark = pytest.mark.slow

# When and who, in the order of the kills.
ONE_PROCESS = (("work", "group"), ("writing", "main"), ("start-up", "main"), ("writing", "group"), ("work", "main"))
SEVERAL = (("work", "child"), ("work", "main"), ("writing", "child"), ("start-up", "main"), ("writing", "group"))
KILLS = {
    "prompts": 2, "regenerate": 3, "harvest": 4, "train, 1 rank": 4, "train, 2 ranks": 6, "export": 3, "acceptance": 3,
    "serving": 3, "report": 2, "train, peagle": 2, "train, dflash": 2, "train, dspark": 2,
}  # fmt: skip
# What a measurement under load looks like; two servers more would cost a minute.
ROUGHLY = Undisturbed({}, seconds=40.0, first_name=5.0, names=10, temporary=4)


@pytest.mark.long
def test_training_on_two_ranks_survives_a_kill(campaign, chooser):
    campaign.run("train, 2 ranks")
    campaign.kill("train, 2 ranks", [chooser.choice(SEVERAL)], chooser, hits=1)


@pytest.mark.long
def test_serving_survives_a_kill(campaign, chooser):
    """Without an undisturbed twin: a server that was measured stays as it is, and every prompt has its answer."""
    campaign.run("export")
    stage, root = STAGES["serving"], campaign.root
    moment = chooser.choice([("work", "main"), ("work", "child"), ("start-up", "main"), ("writing", "group")])
    while not kill_once(stage, root, ROUGHLY, *moment, chooser, *campaign.overrides):  # it was over
        stage.clear(root)
        moment = ("start-up", "main")
    measured = stage.payload(root, finished=False)
    finish(stage, root, *campaign.overrides)
    assert measured.items() <= stage.payload(root).items()
    assert not stage.leftovers(root)
    rows, _ = counted(root / stage.writes[0])
    assert set(rows["method"]) == {"none", "head"}
    of_all = rows[rows["workload"] == "all"]
    assert of_all["prompt_id"].nunique() * 2 == len(of_all) == 16
    assert len(rows) > len(of_all), "conversations are measured too"
    assert not rows["error"].any()


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", STAGES)
def test_a_stage_survives_many_kills(soak_campaign, name, chooser):
    soak_campaign.run(name)
    several = "train" in name or name == "serving"
    soak_campaign.kill(name, SEVERAL if several else ONE_PROCESS, chooser, hits=KILLS[name])
