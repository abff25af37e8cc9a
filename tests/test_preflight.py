"""What later stages need is asked by the first command, whichever it is: exit code, and what the message names."""

import json
import re
from pathlib import Path

import pytest

from drafthead.config import load_recipe
from drafthead.target.families import gives_hidden_states
from drafthead.target.spec import load_target_spec, target_config
from drafthead.target.tokenizer import load_tokenizer
from tests.damage import edit_config
from tests.scripts import run_here, run_python

PROMPTS, PLAN, TRAIN = "data_gen/prompts.py", "data_gen/dry_run.py", "train/eagle3.py"
STAGES = (PROMPTS, PLAN, "data_gen/regenerate.py", "data_gen/harvest.py", TRAIN, "export/head.py")


def refused(capsys: pytest.CaptureFixture, script: str, *arguments: str) -> str:
    """Run a command that must be refused; returns the message."""
    capsys.readouterr()
    assert run_here(script, *arguments) == 1
    message = capsys.readouterr().err.strip()
    assert "Traceback" not in message
    return message


@pytest.mark.parametrize(
    "overrides",
    [
        ("head.draft_vocab_size=9999999",),
        ("target.aux_layer_ids=[2,4,9]",),
        ("head.type=dflash", "head.mask_token_id=3072"),
        ("engine.max_model_len=9999999",),
        ("head.num_attention_heads=10", "head.num_key_value_heads=10", "engine.tensor_parallel_size=5"),
        ("prompts.path=/nowhere/prompts.jsonl",),
        ("prompts.path=/dev/shm/drafthead-nothing/x",),
    ],
)
@pytest.mark.parametrize("script", STAGES)
def test_what_lies_beyond_the_target_or_is_not_there(tmp_path, capsys, script, overrides):
    message = refused(capsys, script, f"output_dir={tmp_path}", *overrides)
    key, _, value = overrides[-1].partition("=")
    assert key in message
    assert value.strip("[]").split(",")[-1] in message
    assert not list(tmp_path.iterdir())


def test_a_file_of_prompts_that_is_empty(tmp_path, capsys):
    (tmp_path / "p.jsonl").touch()
    message = refused(capsys, PLAN, f"output_dir={tmp_path}", f"prompts.path={tmp_path}/p.jsonl")
    assert "prompts.path" in message
    assert f"{tmp_path}/p.jsonl" in message


def test_a_plan_needs_config_json_and_nothing_else_of_a_target(tmp_path, target):
    for path in target.iterdir():
        if path.name != "config.json":
            path.unlink()
    assert run_here(PLAN, f"output_dir={tmp_path}", f"target.path={target}") == 0


def test_nothing_slow_is_imported(tmp_path):
    code = "import sys; from drafthead.preflight import preflight; from drafthead.config import load_recipe\n"
    code += "preflight(load_recipe()); print(sorted({'torch', 'transformers', 'vllm'} & set(sys.modules)))"
    assert run_python("-c", code).stdout.strip() == "[]"


# vLLM hands out the family's hidden states

WITHOUT = (
    "Glm4ForCausalLM", "Glm4MoeForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM", "Exaone4ForCausalLM",
    "InternLM2ForCausalLM", "PhiMoEForCausalLM",
)  # fmt: skip


@pytest.mark.parametrize("script", STAGES)
def test_a_family_without_hidden_states_is_refused_by_every_command(tmp_path, capsys, target, script):
    edit_config(target, architectures=["Glm4ForCausalLM"])
    message = refused(capsys, script, f"output_dir={tmp_path}/out", f"target.path={target}")
    assert re.search(r"vLLM 0\.\d+.*Glm4ForCausalLM", message)
    assert not (tmp_path / "out").exists()


def test_families_that_lack_hidden_states():
    assert {name: gives_hidden_states([name]) for name in WITHOUT} == dict.fromkeys(WITHOUT, False)
    assert gives_hidden_states(["GptOssForCausalLM"])
    assert gives_hidden_states(["Olmo2ForCausalLM"])  # through vLLM's class for models of transformers


# A class that each platform has another file of, and which may capture on one of them.
BY_PLATFORM = {"DeepseekV4ForConditionalGeneration"}
RESOLVED = """
import json, logging
logging.disable(logging.CRITICAL)
from vllm.model_executor.models.interfaces import supports_eagle3
from vllm.model_executor.models.registry import ModelRegistry
found = {}
for name, model in ModelRegistry.models.items():
    try:
        found[name] = bool(supports_eagle3(model.load_model_cls()))
    except (ImportError, AttributeError):  # for want of torchvision, say
        pass
print(json.dumps(found))
"""


@pytest.mark.slow
def test_hidden_states_are_judged_as_vllm_does_for_every_class_that_it_can_load_here():
    resolved = json.loads(run_python("-c", RESOLVED).stdout.splitlines()[-1])
    assert len(resolved) > 200
    read = {name: gives_hidden_states([name]) for name in resolved}
    assert {name for name in resolved if read[name] != resolved[name]} <= BY_PLATFORM


# config.json as published

GEMMA3 = {
    "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "torch_dtype": "bfloat16",
    "text_config": {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    },
}  # fmt: skip


def write_config(target: Path, config: dict) -> str:
    (target / "config.json").write_text(json.dumps(config))
    return str(target)


def test_keys_that_are_the_familys_defaults_may_be_left_out(tmp_path, target):
    spec = load_target_spec(write_config(target, GEMMA3))
    assert (spec.vocab_size, spec.rms_norm_eps, spec.max_position_embeddings) == (262208, 1e-6, 131072)
    assert (spec.rope_parameters["rope_theta"], spec.dtype, spec.model_type) == (1e6, "bfloat16", "gemma3_text")
    small = {"hidden_size": 192, "num_hidden_layers": 8, "num_attention_heads": 6, "vocab_size": 3072}
    write_config(target, {"architectures": ["MistralForCausalLM"], "model_type": "mistral", **small})
    assert load_target_spec(str(target)).max_position_embeddings == 4096 * 32
    assert run_here(PLAN, f"output_dir={tmp_path}", f"target.path={target}") == 0


def test_a_default_of_the_family_is_refused_as_if_it_were_stated(capsys, target):
    """Gemma 2 caps its logits whether config.json says so or not."""
    write_config(target, {"model_type": "gemma2", "vocab_size": 3072})
    assert "final_logit_softcapping=30.0" in refused(capsys, PROMPTS, f"target.path={target}")


def test_a_refusal_is_not_called_damage(capsys, target):
    edit_config(target, model_type="nobody")
    message = refused(capsys, PLAN, f"target.path={target}")
    assert "nobody" in message
    assert "cannot be read" not in message
    assert "etch" not in message  # "fetch the checkpoint again"


def test_a_key_that_neither_config_json_nor_its_family_has_is_named(capsys, target):
    write_config(target, {"model_type": "nobody", "hidden_size": 192})
    message = refused(capsys, PROMPTS, f"target.path={target}")
    assert all(word in message for word in ("num_hidden_layers", "rms_norm_eps", "nobody"))


FAMILIES = """
import json, logging
logging.disable(logging.CRITICAL)
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
keys = %r
found = {}
for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
    try:
        config = AutoConfig.for_model(name)
    except Exception:  # needs another package, or parts that have no default
        continue
    if config.get_text_config() is config and hasattr(config, "rms_norm_eps"):
        found[name] = {key: getattr(config, key, None) for key in keys}
print(json.dumps(found))
"""
READ = (
    "hidden_size", "num_hidden_layers", "vocab_size", "rms_norm_eps", "max_position_embeddings", "num_attention_heads",
    "final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier",
)  # fmt: skip
# What the class computes, or has under another name: then config.json has to state it.
COMPUTED = {
    ("hrm_text", "num_hidden_layers"), ("jetmoe", "num_attention_heads"), ("longcat_flash", "num_hidden_layers"),
    ("minicpm3", "logits_scaling"),
}  # fmt: skip


@pytest.mark.slow
def test_defaults_are_those_of_every_familys_config_class(target):
    classes = json.loads(run_python("-c", FAMILIES % (READ,)).stdout.splitlines()[-1])
    assert len(classes) > 80
    different = set()
    for name, expected in classes.items():
        read = target_config(write_config(target, {"model_type": name}))
        different |= {(name, key) for key in READ if expected[key] is not None and read.get(key) != expected[key]}
    assert different <= COMPUTED


# The chat template

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


def named(*names: str) -> str:
    return json.dumps({"chat_template": [{"name": name, "template": TEMPLATE} for name in names]})


def keep(target: Path, files: dict[str, str]) -> None:
    """Leave the target no chat template but those of `files`."""
    (target / "chat_template.jinja").unlink()
    config = json.loads((target / "tokenizer_config.json").read_text())
    for name, content in files.items():
        if name == "tokenizer_config.json":
            content = json.dumps(config | json.loads(content))
        (target / name).parent.mkdir(exist_ok=True)
        (target / name).write_text(content)


@pytest.mark.parametrize(
    "files",
    [
        {"chat_template.json": json.dumps({"chat_template": TEMPLATE})},
        {"tokenizer_config.json": json.dumps({"chat_template": TEMPLATE})},
        {"tokenizer_config.json": named("tool_use", "default")},
        {"chat_template.jinja": TEMPLATE, "additional_chat_templates/rag.jinja": TEMPLATE},
    ],
)
def test_a_chat_template_is_found_where_others_keep_it(tmp_path, target, files):
    keep(target, files)
    arguments = [f"output_dir={tmp_path}", f"target.path={target}"]
    assert run_here(PROMPTS, *arguments) == 0
    tokenizer = load_tokenizer(load_recipe(overrides=arguments), templated=True)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False) == "Hi"


@pytest.mark.parametrize(
    ("files", "names"),
    [
        ({}, ("chat_template.jinja", "chat_template.json", "tokenizer_config.json", "additional_chat_templates")),
        ({"tokenizer_config.json": named("rag", "tool_use")}, ("rag", "tool_use", "default", "chat_template.jinja")),
        ({"additional_chat_templates/rag.jinja": TEMPLATE}, ("rag", "default")),
        ({"chat_template.json": "{"}, ("chat_template.json cannot be read",)),
    ],
)
def test_a_target_without_a_chat_template_is_refused_by_the_first_stage(tmp_path, capsys, target, files, names):
    keep(target, files)
    message = refused(capsys, PROMPTS, f"output_dir={tmp_path}/out", f"target.path={target}")
    assert all(name in message for name in (str(target), *names))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "name", ["generation_config.json", "chat_template.json", "additional_chat_templates/rag.jinja"]
)
def test_what_decides_prompts_and_where_responses_end_is_part_of_which_target_it_is(target, name):
    before = load_target_spec(str(target)).fingerprint
    (target / name).parent.mkdir(exist_ok=True)
    (target / name).write_text('{"eos_token_id": 7}')
    assert load_target_spec(str(target)).fingerprint != before


# The launcher


@pytest.mark.parametrize(
    ("variables", "names"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, ("not LOCAL_RANK", "WORLD_SIZE=2")),
        ({"WORLD_SIZE": "2"}, ("WORLD_SIZE=2", "not RANK")),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, ("OMPI_COMM_WORLD_SIZE=4", "RANK")),
        ({"SLURM_STEP_NUM_TASKS": "8"}, ("SLURM_STEP_NUM_TASKS=8", "RANK")),
        (
            {"RANK": "2", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
            ("RANK=2", "WORLD_SIZE=2"),
        ),
        (
            {"RANK": "one", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
            ("RANK=one",),
        ),
    ],
)
def test_what_a_launcher_must_bring_is_named(tmp_path, capsys, monkeypatch, variables, names):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    message = refused(capsys, TRAIN, f"output_dir={tmp_path}")
    assert all(name in message for name in names)
    assert "accelerate launch" in message
