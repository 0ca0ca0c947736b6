"""Readers of trainers' examples: what they find in a script, and what they say that they cannot know."""

import subprocess
from pathlib import Path

import pytest

from scripts.trainers import openrlhf, prime_rl, skyrl, verl
from scripts.trainers.examples import Configuration, Mirror
from scripts.trainers.shell import UNKNOWN, Unreadable, read


def words(text: str, **variables: str) -> list[str]:
    """Of the last program that a script launches."""
    return read(text, variables).commands[-1]


@pytest.mark.parametrize(
    ("script", "found"),
    [
        ("a=${A:-1}; run x=$a y='$a' \"z=${a}2\"", ["run", "x=1", "y=$a", "z=12"]),
        (': "${N:=4}"\nrun n=$N', ["run", "n=4"]),
        ("a=(p=1 'q=2 3')\na+=(r=4) # )\nrun \"${a[@]}\" end", ["run", "p=1", "q=2 3", "r=4", "end"]),
        ("run $((2 * (3 + 1))) $(( 7 / 2 ))", ["run", "8", "3"]),
        ("m=b/c.d; run ${m##*/} ${m%.*} ${m^^}", ["run", "c.d", "b/c", "B/C.D"]),
        ("w='1 2'; run $w \"$w\"", ["run", "1", "2", "1 2"]),
        ('if [ -z "$A" ]; then b=1; elif [ x = y ]; then b=2; else b=3; fi; run $b', ["run", "1"]),
        ('[[ "$A" == *q* && 3 -gt 2 ]] || b=4; run $b', ["run", "4"]),
        ("case x1 in a|b) b=1 ;; x*) b=2 ;; *) b=3 ;; esac\nrun $b", ["run", "2"]),
        ("f() { b=$1; }\nf 7\nrun $b", ["run", "7"]),
        ("for i in 1 2; do b=$b$i; done; run $b", ["run", "12"]),
        ("run \\\n  a=1 \\\n  $@ > /dev/null 2>&1", ["run", "a=1"]),
        ("cat <<E\nrun no\nE\nrun yes", ["run", "yes"]),
        ("A=1 run b", ["run", "b"]),
    ],
)
def test_a_script_is_read_as_a_shell_reads_it(script: str, found: list[str], tmp_path: Path) -> None:
    assert words(script) == found
    shell = [
        "bash",
        "-c",
        f'run() {{ [[ $1 == no ]] || printf "%s\\n" run "$@"; }}\n{script.replace("> /dev/null 2>&1", "")}',
    ]
    done = subprocess.run(
        shell, capture_output=True, text=True, check=False, env={"PATH": "/bin:/usr/bin"}, cwd=tmp_path
    )
    assert [line for line in done.stdout.splitlines() if not line.startswith("run no")] == found


def test_what_the_machine_decides_is_unknown_and_so_is_what_follows_from_it() -> None:
    assert words("run x=$(nproc) $HOME/a") == ["run", f"x={UNKNOWN}", f"{UNKNOWN}/a"]
    assert words("if [ -f /a ]; then b=1; else c=2; fi; run $b $c") == ["run", UNKNOWN, UNKNOWN]
    assert words("b=1; [ -d /a ] && b=2; run $b") == ["run", UNKNOWN]
    assert words("case $(uname) in x) b=1 ;; esac; run $b") == ["run", UNKNOWN]
    assert words("b=$(uname)\nrun $((b + 1)) ${b:-1}") == ["run", UNKNOWN, UNKNOWN]
    assert read("if [ -f /a ]; then run 1; fi").commands == [[UNKNOWN, "run", "1"]]


def test_a_script_of_another_language_is_not_read() -> None:
    with pytest.raises(Unreadable):
        read("if x; then y\n")


class Files(Mirror):
    """A mirror of some texts."""

    def __init__(self, **texts: str) -> None:
        self._texts = texts

    def paths(self, folder: str, *endings: str) -> list[str]:
        return [path for path in self._texts if path.startswith(folder) and path.endswith(endings)]

    def text(self, path: str) -> str:
        return self._texts[path]


VERL = {
    "verl/workers/config/rollout.py": "class RolloutConfig:\n    enable_sleep_mode: bool = True\n",
    "verl/workers/config/model.py": (
        "class MtpConfig:\n    enable: bool = False\n    enable_rollout: bool = False\n    method: str = 'mtp'\n"
        "    num_speculative_tokens: int = 1\n"
    ),
    "verl/trainer/config/rollout/rollout.yaml": (
        "name: ???\ndtype: bfloat16\nload_format: dummy\nmax_model_len: null\nmax_num_seqs: 256\nseed: 42\n"
        "enable_chunked_prefill: True\nmax_num_batched_tokens: 8192\nenable_prefix_caching: True\n"
        "logprobs_mode: processed_logprobs\nenforce_eager: False\ngpu_memory_utilization: 0.5\n"
        "disable_log_stats: True\nscheduling_policy: fcfs\nquantization: null\ntensor_model_parallel_size: 2\n"
        "data_parallel_size: 1\npipeline_model_parallel_size: 1\nexpert_parallel_size: 1\n"
        "enable_rollout_routing_replay: False\ncudagraph_capture_sizes: null\n"
    ),
}


def of_verl(script: str) -> Configuration:
    launch = f"python3 -m verl.trainer.main_ppo actor_rollout_ref.rollout.name=vllm {script}"
    [found] = verl.configurations(Files(**VERL, **{"examples/a.sh": launch}))
    return found


def test_verl_at_its_defaults_asks_for_two_gpus_and_sleeps() -> None:
    found = of_verl("actor_rollout_ref.model.path=Qwen/Qwen3-8B")
    assert (found.model, found.gpus, found.unread) == ("Qwen/Qwen3-8B", 2, "")
    assert found.arguments["enable_sleep_mode"] is True
    assert found.arguments["tensor_parallel_size"] == 2
    assert found.arguments["compilation_config"] == {"cudagraph_mode": "FULL_AND_PIECEWISE"}
    assert "enforce_eager" not in found.arguments, "False is left out, as its server does"


def test_overrides_of_verl_become_arguments() -> None:
    found = of_verl(
        "actor_rollout_ref.model.path=$HOME/m/Qwen3-8B +actor_rollout_ref.rollout.enable_sleep_mode=False "
        "actor_rollout_ref.rollout.tensor_model_parallel_size=4 actor_rollout_ref.rollout.data_parallel_size=2 "
        "actor_rollout_ref.rollout.expert_parallel_size=8 actor_rollout_ref.model.lora_rank=24 "
        "actor_rollout_ref.rollout.enable_rollout_routing_replay=True actor_rollout_ref.model.mtp.enable=True "
        "actor_rollout_ref.model.mtp.enable_rollout=True "
        "+actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_dtype=fp8 trainer.n_gpus_per_node=4"
    )
    expected = {
        "data_parallel_size": 2, "data_parallel_size_local": 1, "nnodes": 2, "enable_expert_parallel": True,
        "max_lora_rank": 32, "enable_return_routed_experts": True, "kv_cache_dtype": "fp8",
        "speculative_config": {"method": "mtp", "num_speculative_tokens": 1},
    }  # fmt: skip
    assert (found.model, found.gpus) == ("Qwen3-8B", 8)
    assert {name: found.arguments.get(name) for name in expected} == expected
    assert "enable_sleep_mode" not in found.arguments


def test_what_a_script_does_not_say_is_told_and_not_guessed() -> None:
    assert of_verl("actor_rollout_ref.model.path=$MODEL").unread == "the model is not in the script"
    size = "actor_rollout_ref.rollout.tensor_model_parallel_size=$(nvidia-smi -L | wc -l)"
    assert of_verl(f"actor_rollout_ref.model.path=a/b {size}").unread == "the number of GPUs depends on the machine"
    name = "actor_rollout_ref.rollout.dtype=$(uname)"
    assert of_verl(f"actor_rollout_ref.model.path=a/b {name}").unread == "dtype depends on the machine"


def test_colocated_engines_of_skyrl_sleep_under_ray() -> None:
    config = (
        "class InferenceEngineConfig:\n    model_dtype: str = 'bfloat16'\n    run_engines_locally: bool = True\n"
        "    backend: str = 'vllm'\n    tensor_parallel_size: int = 1\n    pipeline_parallel_size: int = 1\n"
        "    expert_parallel_size: int = 1\n    data_parallel_size: int = 1\n    gpu_memory_utilization: float = 0.8\n"
        "    enable_prefix_caching: bool = True\n    enforce_eager: bool = False\n"
        "    max_num_batched_tokens: int = 8192\n    max_num_seqs: int = 1024\n    enable_pd: bool = False\n"
        "    offload_kv_for_weight_sync: bool = False\n    enable_return_routed_experts: bool = False\n"
        "    language_model_only: bool = False\n    distributed_executor_backend: str = 'ray'\n"
        "    speculative_config: dict | None = None\n    engine_init_kwargs: dict = field(default_factory=dict)\n"
        "class PlacementConfig:\n    colocate_all: bool = True\n"
        "class MegatronLoraConfig:\n    merge_lora: bool = True\n"
    )

    def found(script: str) -> Configuration:
        launch = (
            f"export VLLM_USE_V1=1\nuv run -m skyrl.train.entrypoints.main_base trainer.policy.model.path=a/b {script}"
        )
        texts = {"skyrl/train/config/config.py": config, "examples/a.sh": launch}
        [one] = skyrl.configurations(Files(**texts))
        return one

    one = found("generator.inference_engine.tensor_parallel_size=2")
    assert (one.gpus, one.variables) == (2, {"VLLM_USE_V1": "1"})
    assert one.arguments["enable_sleep_mode"] is True
    assert one.arguments["distributed_executor_backend"] == "ray"
    rank = "trainer.policy.model.lora.rank=32 generator.inference_engine.tensor_parallel_size=1"
    assert found(rank).arguments["enable_lora"] is True
    assert "enable_lora" not in found(f"{rank} trainer.strategy=megatron").arguments
    external = "generator.inference_engine.run_engines_locally=false"
    assert found(external).unread == "its engines are servers that another script starts"


def test_openrlhf_runs_two_gpus_by_ray_and_sleeps_where_it_colocates() -> None:
    switches = ("vllm.enforce_eager", "vllm.enable_prefix_caching", "vllm.enable_sleep", "train.colocate_all")
    values = {
        "vllm.num_engines": None, "vllm.tensor_parallel_size": 1, "vllm.gpu_memory_utilization": 0.95,
        "train.seed": 42, "data.max_len": 2048, "data.max_images_per_prompt": 0, "actor.model_name_or_path": None,
    }  # fmt: skip
    lines = [f"parser.add_argument('--{name}', default={value!r})" for name, value in values.items()]
    more = (*switches, "algo.advantage.is_correction_enable")
    lines += [f"parser.add_argument('--{name}', action='store_true', default=False)" for name in more]
    launch = (
        "python3 -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path a/b --vllm.num_engines 4 "
        "--vllm.tensor_parallel_size 2 --vllm.enable_sleep"
    )
    texts = {"openrlhf/cli/train_ppo_ray.py": "\n".join(lines), "examples/a.sh": launch}
    [apart] = openrlhf.configurations(Files(**texts))
    [together] = openrlhf.configurations(Files(**texts | {"examples/a.sh": f"{launch} --train.colocate_all"}))
    assert (
        apart.arguments["distributed_executor_backend"] == together.arguments["distributed_executor_backend"] == "ray"
    )
    assert (apart.arguments["enable_sleep_mode"], together.arguments["enable_sleep_mode"]) == (False, True)


def test_prime_rl_fills_its_gpus_with_engines_and_tells_its_patches_by_additional_config() -> None:
    source = (
        "class VllmConfig:\n    model: str = 'a/b'\n    tensor_parallel_size: int = 1\n"
        "    data_parallel_size: int = Field(1, ge=1)\n    enable_lora: bool = False\n"
        "    enable_expert_parallel: bool = False\n"
        "class InferenceConfig:\n    enable_fp32_lm_head: bool = True\n    enable_fp32_router_logits: bool = True\n"
        "    kv_cache_offload: None = None\n"
    )
    toml = "[model]\nname = 'a/c'\n[deployment]\nnum_infer_gpus = 4\n[inference]\n"
    path = "packages/prime-rl-configs/src/prime_rl/configs/inference.py"
    [found] = prime_rl.configurations(Files(**{path: source, "examples/a.toml": toml}))
    assert (found.model, found.gpus) == ("a/c", 4)
    assert found.arguments["additional_config"] == {"fp32_lm_head": True, "fp32_router_logits": True}
    assert found.variables == {"VLLM_USE_V2_MODEL_RUNNER": "0"}
