"""What is in deploy/ fits the project: versions, variables, options, files, and the program of the readiness probe."""

import ast
import http.server
import importlib
import inspect
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.docs.documents import PROJECT, ROOT, of_command
from vllm_batch_invariant import envs
from vllm_batch_invariant.integration import reviews
from vllm_batch_invariant.integration.engine.endpoint import METRIC
from vllm_batch_invariant.integration.engine.server import LABELS
from vllm_batch_invariant.integration.engine.witness import DIFFERENCES, RUNS
from vllm_batch_invariant.integration.reviews import patch_points, versions

DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text()
COMPOSE = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())["services"]["vllm"]
CLAIM, DEPLOYMENT, SERVICE = yaml.safe_load_all((ROOT / "deploy" / "kubernetes.yaml").read_text())
ALERTS = yaml.safe_load((ROOT / "deploy" / "alerts.yaml").read_text())
MONITOR = yaml.safe_load((ROOT / "deploy" / "podmonitor.yaml").read_text())
POOL, ROUTE = yaml.safe_load_all((ROOT / "deploy" / "inference-pool.yaml").read_text())
STACK = yaml.safe_load((ROOT / "deploy" / "production-stack.yaml").read_text())["servingEngineSpec"]
[OF_THE_STACK] = STACK["modelSpec"]
RAY = yaml.safe_load((ROOT / "deploy" / "ray-service.yaml").read_text())["spec"]
[RAY_APPLICATION] = yaml.safe_load(RAY["serveConfigV2"])["applications"]
[RAY_MODEL] = RAY_APPLICATION["args"]["llm_configs"]
DYNAMO = yaml.safe_load((ROOT / "deploy" / "dynamo.yaml").read_text())["spec"]
POD = DEPLOYMENT["spec"]["template"]
[CONTAINER] = POD["spec"]["containers"]
OF_OTHERS = {
    "TRITON_CACHE_DIR": "triton.knobs",
    "HF_TOKEN": "huggingface_hub.constants",
    "PIP_BREAK_SYSTEM_PACKAGES": "",
}
"""Variables with the modules that read them; pip makes names of its options."""
METRICS = f'{METRIC}{{attention="triton",guarantees="run,batch,schedule",version="0.1.0"}}'


def test_the_images_have_this_version_and_a_vllm_that_is_known() -> None:
    tag = f"vllm-batch-invariant:{PROJECT['project']['version']}"
    assert re.findall(r"-t (\S+)", DOCKERFILE) == [tag]
    assert COMPOSE["image"] == CONTAINER["image"] == tag
    [version] = re.findall(r"^FROM vllm/vllm-openai:v(.*)$", DOCKERFILE, re.MULTILINE)
    assert versions.objection(version, "cuda") == ""


def test_rays_replicas_load_plugins_by_a_class_that_is_there() -> None:
    """Ray is not in every environment: its source has it."""
    module, _, name = RAY_MODEL["callback_config"]["callback_class"].rpartition(".")
    source = ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text())
    assert name in {node.name for node in source.body if isinstance(node, ast.ClassDef)}


def test_every_variable_is_read_by_somebody_and_the_mode_is_on() -> None:
    set_in_image = dict(re.findall(r"^(?:ENV|   ) (\w+)=(\S+)", DOCKERFILE, re.MULTILINE))
    assert set_in_image[envs.FLAG] == "1"
    assert {"name": envs.FLAG, "value": "1"} in CONTAINER["env"]
    names = {*re.findall(r"\b([A-Z]+_[A-Z_]+)=", DOCKERFILE), *COMPOSE["environment"]}
    names |= {variable["name"] for variable in CONTAINER["env"]}
    assert set_in_image.keys() < names
    for name in names - {variable.name for variable in envs.VARIABLES}:
        if name in OF_OTHERS:
            assert not (module := OF_OTHERS[name]) or name in inspect.getsource(importlib.import_module(module))
        else:
            assert name in patch_points.ENVIRONMENT.get()


@pytest.mark.parametrize("arguments", [COMPOSE["command"], CONTAINER["args"]])
def test_the_arguments_are_vllms(arguments: list[str]) -> None:
    assert 'ENTRYPOINT ["vllm", "serve"]' in DOCKERFILE
    assert [*of_command(f"vllm serve {' '.join(arguments)}")] == []


def test_the_image_copies_what_there_is_and_what_the_build_may_see() -> None:
    copied = re.findall(r"^COPY (.*) \S+$", DOCKERFILE, re.MULTILINE)
    files = {name for line in copied for name in line.split()}
    assert all((ROOT / name).exists() for name in files)
    assert {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line[0] == "!"} == files
    assert {PROJECT["project"]["readme"], *PROJECT["project"]["license-files"]} <= files
    assert (ROOT / "deploy" / COMPOSE["build"]["context"] / COMPOSE["build"]["dockerfile"]).samefile(
        ROOT / "deploy" / "Dockerfile"
    )


def test_the_cache_is_where_the_libraries_and_the_volumes_have_it() -> None:
    cache = re.findall(r"^VOLUME (\S+)$", DOCKERFILE, re.MULTILINE)
    assert cache == ["/root/.cache"]
    assert f"TRITON_CACHE_DIR={cache[0]}/" in DOCKERFILE
    assert COMPOSE["volumes"] == [f"cache:{cache[0]}"]
    assert cache[0] in [mount["mountPath"] for mount in CONTAINER["volumeMounts"]]
    [claim] = [volume for volume in POD["spec"]["volumes"] if "persistentVolumeClaim" in volume]
    assert claim["persistentVolumeClaim"]["claimName"] == CLAIM["metadata"]["name"]


def test_the_service_finds_the_pods_of_one_kind_of_gpu_and_sets_no_variables_in_them() -> None:
    assert SERVICE["spec"]["selector"] == POD["metadata"]["labels"] == DEPLOYMENT["spec"]["selector"]["matchLabels"]
    assert list(POD["spec"]["nodeSelector"]) == ["nvidia.com/gpu.product"]
    assert POD["spec"]["enableServiceLinks"] is False


def test_the_image_has_what_the_package_depends_on() -> None:
    """It is installed without dependencies, so that PyTorch and vLLM stay."""
    assert set(PROJECT["project"]["dependencies"]) <= set(re.findall(r"'([\w-]+>=[\d.]+)'", DOCKERFILE))


def test_the_pod_asks_for_what_it_needs_and_may_do_no_more() -> None:
    assert CONTAINER["resources"]["requests"].keys() == {"cpu", "memory"}
    assert CONTAINER["resources"]["limits"] == {"nvidia.com/gpu": "1"}
    assert CONTAINER["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert POD["spec"]["securityContext"] == {"seccompProfile": {"type": "RuntimeDefault"}}
    assert POD["spec"]["automountServiceAccountToken"] is False


def test_an_answer_that_has_begun_can_end_before_the_pod_is_killed() -> None:
    arguments = CONTAINER["args"]
    [sleep, seconds] = CONTAINER["lifecycle"]["preStop"]["exec"]["command"]
    drains = int(arguments[arguments.index("--shutdown-timeout") + 1])
    assert sleep == "sleep"
    assert drains >= 300
    assert POD["spec"]["terminationGracePeriodSeconds"] >= int(seconds) + drains + 20
    assert "shutdown_timeout" in reviews.fields()["VllmConfig"].known, "the mode starts with it"


def test_a_model_behind_a_token_can_be_read_and_the_token_left_out() -> None:
    [token] = [variable for variable in CONTAINER["env"] if variable["name"] == "HF_TOKEN"]
    assert token["valueFrom"]["secretKeyRef"]["optional"] is True
    assert "HF_TOKEN" in COMPOSE["environment"]


def test_the_operator_of_prometheus_reads_the_port_of_these_pods() -> None:
    assert (MONITOR["apiVersion"], MONITOR["kind"]) == ("monitoring.coreos.com/v1", "PodMonitor")
    assert MONITOR["spec"]["selector"]["matchLabels"] == POD["metadata"]["labels"]
    [endpoint] = MONITOR["spec"]["podMetricsEndpoints"]
    assert endpoint["path"] == "/metrics"
    assert endpoint["port"] in [port["name"] for port in CONTAINER["ports"]]


def test_the_alerts_are_of_metrics_and_labels_that_there_are() -> None:
    assert (ALERTS["apiVersion"], ALERTS["kind"]) == ("monitoring.coreos.com/v1", "PrometheusRule")
    rules = [rule for group in ALERTS["spec"]["groups"] for rule in group["rules"]]
    assert len({rule["alert"] for rule in rules}) == len(rules)
    expressions = " ".join(rule["expr"] for rule in rules)
    assert {*re.findall(r"vllm:\w+", expressions)} == {METRIC, f"{RUNS}_total", f"{DIFFERENCES}_total"}
    named = {label for labels in re.findall(r"(?:by|on) \(([\w, ]+)\)", expressions) for label in labels.split(", ")}
    assert named - {"instance"} <= {*LABELS}


def test_every_stack_has_this_version_and_sets_the_flag() -> None:
    [worker] = [one for one in DYNAMO["components"] if one["type"] == "worker"]
    [of_dynamo] = worker["podTemplate"]["spec"]["containers"]
    images = {of_dynamo["image"], f"{OF_THE_STACK['repository']}:{OF_THE_STACK['tag']}"}
    images |= {pod["containers"][0]["image"] for pod in ray_pods()}
    assert {image.split(":")[1] for image in images} == {PROJECT["project"]["version"]}
    assert {"name": envs.FLAG, "value": "1"} in of_dynamo["env"]
    assert {"name": envs.FLAG, "value": "1"} in OF_THE_STACK["env"]
    assert RAY_MODEL["runtime_env"]["env_vars"] == {envs.FLAG: "1"}


def ray_pods() -> list[dict[str, Any]]:
    cluster = RAY["rayClusterConfig"]
    return [group["template"]["spec"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]


def test_every_stack_has_replicas_on_one_kind_of_gpu() -> None:
    [kind] = POD["spec"]["nodeSelector"].items()
    [worker] = [one for one in DYNAMO["components"] if one["type"] == "worker"]
    for pod in (worker["podTemplate"]["spec"], ray_pods()[1]):
        assert pod["nodeSelector"] == dict([kind])
        assert pod["enableServiceLinks"] is False
    [[term]] = [terms["matchExpressions"] for terms in OF_THE_STACK["nodeSelectorTerms"]]
    assert term == {"key": kind[0], "operator": "In", "values": [kind[1]]}
    fewest = RAY_MODEL["deployment_config"]["autoscaling_config"]["min_replicas"]
    assert min(fewest, worker["replicas"], OF_THE_STACK["replicaCount"]) > 1


def test_rays_pods_come_and_go_with_its_replicas_and_answers_may_end() -> None:
    number = RAY_MODEL["deployment_config"]["autoscaling_config"]
    [group] = RAY["rayClusterConfig"]["workerGroupSpecs"]
    assert RAY["rayClusterConfig"]["enableInTreeAutoscaling"] is True
    assert "num_replicas" not in RAY_MODEL["deployment_config"]
    assert group["replicas"] == number["initial_replicas"] == number["min_replicas"], "one GPU a pod"
    assert (group["minReplicas"], group["maxReplicas"]) == (number["min_replicas"], number["max_replicas"])
    assert number["max_replicas"] > number["min_replicas"]
    assert RAY_MODEL["deployment_config"]["graceful_shutdown_timeout_s"] >= 300


def test_the_pool_and_its_route_have_the_pods_and_the_port_of_the_deployment() -> None:
    assert POOL["spec"]["selector"]["matchLabels"] == POD["metadata"]["labels"]
    assert [port["number"] for port in POOL["spec"]["targetPorts"]] == [CONTAINER["ports"][0]["containerPort"]]
    [rule] = ROUTE["spec"]["rules"]
    assert rule["backendRefs"] == [
        {"group": POOL["apiVersion"].split("/")[0], "kind": POOL["kind"], "name": POOL["metadata"]["name"]}
    ]


def test_the_arguments_of_every_stack_are_vllms() -> None:
    [worker] = [one for one in DYNAMO["components"] if one["type"] == "worker"]
    [of_dynamo] = worker["podTemplate"]["spec"]["containers"]
    dynamo = " ".join(of_dynamo["args"]).removeprefix("--model ")
    stack = f"{OF_THE_STACK['modelURL']} {' '.join(OF_THE_STACK['vllmConfig']['extraArgs'])}"
    engine = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in RAY_MODEL["engine_kwargs"].items())
    for arguments in (dynamo, stack, f"{RAY_MODEL['model_loading_config']['model_id']} {engine}"):
        assert [*of_command(f"vllm serve {arguments}")] == []
    assert OF_THE_STACK["lmcacheConfig"] == {"enabled": False}


def test_ray_takes_the_application_and_reads_the_variables_of_its_nodes() -> None:
    pytest.importorskip("ray")
    from ray.llm._internal.serve import constants as of_llm
    from ray.llm._internal.serve.core.ingress.builder import LLMServingArgs
    from ray.serve._private import constants as of_serve
    from ray.serve.config import AutoscalingConfig
    from ray.serve.schema import ServeDeploySchema

    assert ServeDeploySchema.model_validate(yaml.safe_load(RAY["serveConfigV2"])).applications[0].name == "llm"
    [model] = LLMServingArgs.model_validate(RAY_APPLICATION["args"]).llm_configs
    assert model.get_engine_config().placement_bundles[0]["GPU"] == 1
    number = model.deployment_config["autoscaling_config"]
    assert number.keys() <= AutoscalingConfig.model_fields.keys()
    assert AutoscalingConfig(**number).max_replicas == number["max_replicas"]
    for pod in ray_pods():
        for variable in pod["containers"][0]["env"]:
            assert any(hasattr(module, variable["name"]) for module in (of_llm, of_serve))


@pytest.fixture
def page() -> Iterator[dict[str, Any]]:
    """What a server on the port of the probe answers at /metrics; the port is free to choose here."""
    answer: dict[str, Any] = {}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(answer["page"].encode())

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        answer["port"] = server.server_port
        yield answer
        server.shutdown()


@pytest.mark.parametrize(
    ("metrics", "status"),
    [
        (f"# HELP x\n{METRICS} 1.0\nvllm:other 0.0\n", 0),
        (f"{METRICS} 0.0\n{METRICS} 1.0\n", 0),
        (f"{METRICS} 0.0\nvllm:other 1.0\n", 1),
        (f"# HELP {METRIC} 1\nvllm:other 1.0\n", 1),
    ],
)
def test_the_readiness_probe_passes_only_a_server_whose_mode_is_on(
    page: dict[str, Any], metrics: str, status: int
) -> None:
    page["page"] = metrics
    interpreter, flag, program = CONTAINER["readinessProbe"]["exec"]["command"]
    assert (interpreter, flag) == ("python3", "-c")
    program = program.replace("127.0.0.1:8000", f"127.0.0.1:{page['port']}")
    assert subprocess.run([sys.executable, flag, program], check=False).returncode == status


def test_health_is_asked_for_on_the_port_that_is_served() -> None:
    assert "http://127.0.0.1:8000/health" in DOCKERFILE
    assert [port["containerPort"] for port in CONTAINER["ports"]] == [8000]
    for probe in ("startupProbe", "livenessProbe"):
        assert CONTAINER[probe]["httpGet"] == {"path": "/health", "port": "http"}
