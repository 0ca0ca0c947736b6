"""The container of deploy/label.yaml has the labels of its pod follow what a server says; both servers are local."""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.docs.documents import ROOT
from tests.docs.test_deploy import CONTAINER, DEPLOYMENT, POD, POOL
from vllm_batch_invariant.integration.engine import endpoint

ACCOUNT, ROLE, BINDING, PROGRAM = yaml.safe_load_all((ROOT / "deploy" / "label.yaml").read_text())
PATCH = ROOT / "deploy" / "label-patch.yaml"
PATCHED = yaml.safe_load(PATCH.read_text())["spec"]["template"]["spec"]
[LABEL] = PATCHED["containers"]
NAMES = ("batch-invariant/fingerprint", "batch-invariant/witness")
SAID = {"fingerprint": "vllm-0.33.0-batch-invariant-0123456789abcdef", "witness": "1-0123456789abcdef"}
PUT = dict(zip(NAMES, SAID.values(), strict=True))


@dataclass
class Cluster:
    """A server and an API server in one.

    Attributes:
        says: of itself; None: it is not there.
        refuses: so many patches, before one is taken.
        labels: of each patch that was taken.
        heard: path, type and key of each, and the key of the last question to the server.
    """

    says: dict[str, str] | None
    refuses: int = 0
    labels: list[dict[str, str | None]] = field(default_factory=list)
    heard: list[tuple[str, ...]] = field(default_factory=list)
    key: str = ""

    def await_labels(self, count: int) -> dict[str, str | None]:
        deadline = time.monotonic() + 20
        while len(self.labels) < count:
            assert time.monotonic() < deadline, self
            time.sleep(0.01)
        return self.labels[count - 1]


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Callable[[Cluster], subprocess.Popen]]:
    """Start the container's program beside a cluster."""
    (tmp_path / "token").write_text("of the account")
    (tmp_path / "label.py").write_text(PROGRAM["data"]["label.py"])
    running: list[Any] = []

    def begun(cluster: Cluster) -> subprocess.Popen:
        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None:
                """Say nothing."""

            def do_GET(self) -> None:
                cluster.key = self.headers["Authorization"]
                is_there = cluster.says is not None and self.path == endpoint.PATH
                self._answer(200 if is_there else 503, cluster.says)

            def do_PATCH(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if cluster.refuses:
                    cluster.refuses -= 1
                    self._answer(403, {})
                    return
                cluster.heard.append((self.path, self.headers["Content-Type"], self.headers["Authorization"]))
                assert body.keys() == {"metadata"}
                cluster.labels.append(body["metadata"]["labels"])
                self._answer(200, {})

            def _answer(self, status: int, said: Any) -> None:
                body = json.dumps(said).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        variables = {"SERVER": url, "API": url, "ACCOUNT": str(tmp_path), "SECONDS_BETWEEN": "0.05"}
        of_pod = {"POD_NAME": "pod-1", "POD_NAMESPACE": "models", "VLLM_API_KEY": "of the server", "no_proxy": "*"}
        program = subprocess.Popen([sys.executable, tmp_path / "label.py"], env=os.environ | variables | of_pod)
        running.append((server, program))
        return program

    yield begun
    for server, program in running:
        program.kill()
        program.wait()
        server.shutdown()
        server.server_close()


def test_a_pod_has_the_labels_of_its_server_once_it_has_started(begin: Callable) -> None:
    cluster = Cluster(None, refuses=2)
    begin(cluster)
    assert cluster.await_labels(1) == dict.fromkeys(NAMES), "those of a container before this one"
    cluster.says = SAID
    assert cluster.await_labels(2) == PUT
    assert cluster.heard[1] == (
        "/api/v1/namespaces/models/pods/pod-1",
        "application/merge-patch+json",
        "Bearer of the account",
    )
    assert cluster.key == "Bearer of the server"
    time.sleep(0.5)
    assert len(cluster.labels) == 2, "nothing is put that is there"


def test_labels_follow_the_weights_and_go_with_the_server(begin: Callable) -> None:
    cluster = Cluster(SAID)
    program = begin(cluster)
    assert cluster.await_labels(1) == PUT
    cluster.says = {"fingerprint": "vllm-0.33.0+cu129-batch-invariant-1", "witness": ""}
    follows = {NAMES[0]: "vllm-0.33.0_cu129-batch-invariant-1", NAMES[1]: None}
    assert cluster.await_labels(2) == follows, "a witness is being made; no label has a +"
    cluster.says = None
    assert cluster.await_labels(3) == dict.fromkeys(NAMES)
    cluster.says = SAID
    assert cluster.await_labels(4) == PUT
    program.terminate()
    assert program.wait(5) == 0, "the end of a pod does not wait for it"


def test_the_account_may_patch_pods_and_nothing_else_has_it() -> None:
    assert ROLE["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["patch"]}]
    name = ACCOUNT["metadata"]["name"]
    assert PATCHED["serviceAccountName"] == name
    assert BINDING["subjects"] == [{"kind": ACCOUNT["kind"], "name": name}]
    assert BINDING["roleRef"] == {
        "apiGroup": ROLE["apiVersion"].split("/")[0],
        "kind": ROLE["kind"],
        "name": ROLE["metadata"]["name"],
    }
    assert ACCOUNT["automountServiceAccountToken"] is POD["spec"]["automountServiceAccountToken"] is False
    [account] = [mount for mount in LABEL["volumeMounts"] if mount["name"] == "account"]
    assert account["mountPath"] in PROGRAM["data"]["label.py"]
    [volume] = [volume for volume in PATCHED["volumes"] if volume["name"] == "account"]
    [source, certificates] = volume["projected"]["sources"]
    assert source["serviceAccountToken"]["path"] == "token"
    assert certificates["configMap"]["items"] == [{"key": "ca.crt", "path": "ca.crt"}]


def test_the_container_runs_the_program_in_the_image_of_the_server_with_its_key() -> None:
    assert LABEL["image"] == CONTAINER["image"]
    [folder] = [mount["mountPath"] for mount in LABEL["volumeMounts"] if mount["name"] == "label"]
    assert LABEL["command"] == ["python3", *(f"{folder}/{name}" for name in PROGRAM["data"])]
    [volume] = [volume["configMap"]["name"] for volume in PATCHED["volumes"] if "configMap" in volume]
    assert volume == PROGRAM["metadata"]["name"]
    of_server = {variable["name"]: variable for variable in CONTAINER["env"]}
    of_label = {variable["name"]: variable for variable in LABEL["env"]}
    assert of_label["VLLM_API_KEY"] == of_server["VLLM_API_KEY"]
    assert {"POD_NAME", "POD_NAMESPACE"} < of_label.keys()
    assert "nvidia.com/gpu" not in LABEL["resources"]["limits"]
    assert LABEL["securityContext"]["runAsNonRoot"] is LABEL["securityContext"]["readOnlyRootFilesystem"] is True
    assert "label.yaml" in (ROOT / "deploy" / "inference-pool.yaml").read_text()
    assert POOL["spec"]["selector"]["matchLabels"] == POD["metadata"]["labels"]


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl")
def test_kubectl_puts_the_container_beside_the_server(tmp_path: Path) -> None:
    """By the rules for a Deployment, which kubectl has; no cluster is asked."""
    (tmp_path / "deployment.json").write_text(json.dumps(DEPLOYMENT))
    command = ["kubectl", "patch", "--local", "-f", tmp_path / "deployment.json", "--patch-file", PATCH, "-o", "json"]
    made = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)["spec"]["template"]["spec"]
    assert {container["name"] for container in made["containers"]} == {CONTAINER["name"], LABEL["name"]}
    assert CONTAINER in made["containers"]
    assert {volume["name"] for volume in made["volumes"]} == {"cache", "shm", "label", "account"}
    assert made["automountServiceAccountToken"] is False
