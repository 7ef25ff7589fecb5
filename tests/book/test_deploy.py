"""What the cluster page hands out: commands that the command line knows, manifests that Kubernetes' schemas allow."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import typer
import yaml

from nanoinfer.bench.options import BenchConfig, LoadPlan
from nanoinfer.cli.app import app
from nanoinfer.models.fetch import SMOLLM2
from nanoinfer.serve.middleware import OPEN
from tests.book.helpers import ROOT

DEPLOY = ROOT / "book" / "deploy"
SBATCH = DEPLOY / "serve-and-bench.sbatch"
MANIFESTS = ("server.yaml", "bench.yaml")
#: Of `man sbatch` (https://slurm.schedmd.com/sbatch.html): what a script like this one may ask for.
SBATCH_OPTIONS = {
    "account", "array", "chdir", "comment", "constraint", "cpus-per-gpu", "cpus-per-task", "dependency", "error",
    "exclude", "exclusive", "export", "gpus", "gpus-per-node", "gpus-per-task", "gres", "hint", "input", "job-name",
    "kill-on-invalid-dep", "licenses", "mail-type", "mail-user", "mem", "mem-per-cpu", "mem-per-gpu", "nice",
    "nodelist", "nodes", "no-requeue", "ntasks", "ntasks-per-node", "open-mode", "output", "partition", "qos",
    "requeue", "reservation", "signal", "time", "time-min", "wckey",
}  # fmt: skip


# --- commands -------------------------------------------------------------------------


def in_shell(text: str) -> Iterator[list[str]]:
    """Words after each ``nanoinfer`` of a shell's lines, up to where the shell takes over again."""
    for line in text.replace("\\\n", " ").splitlines():
        if re.search(r"(^|[\s/])nanoinfer [a-z]", line) and not line.lstrip().startswith("#"):
            words = shlex.split(line, comments=True)
            at = next(i for i, word in enumerate(words) if Path(word).name == "nanoinfer")
            end = next((i for i, word in enumerate(words) if i > at and word in ("&", "|", ";", "&&")), None)
            yield words[at + 1 : end]


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text("utf8")))


def pod(name: str) -> dict[str, Any]:
    return documents(name)[0]["spec"]["template"]["spec"]


def containers(name: str) -> list[dict[str, Any]]:
    return pod(name)["containers"]


def in_manifest(name: str) -> Iterator[list[str]]:
    for container in containers(name):
        assert container["command"] == ["nanoinfer"]
        yield container["args"]


def in_page() -> Iterator[list[str]]:
    for fence in re.findall(r"```sh\n(.*?)```", (ROOT / "book" / "deploy.md").read_text("utf8"), re.DOTALL):
        yield from in_shell(fence)


def in_dockerfile() -> Iterator[list[str]]:
    text = (DEPLOY / "Dockerfile").read_text("utf8")
    entry, command = (json.loads(re.findall(rf"^{word} (.*)$", text, re.M)[0]) for word in ("ENTRYPOINT", "CMD"))
    assert entry == ["nanoinfer"]
    yield command


def every_command() -> list[list[str]]:
    manifests = [command for name in MANIFESTS for command in in_manifest(name)]
    return [*in_shell(SBATCH.read_text("utf8")), *manifests, *in_page(), *in_dockerfile()]


def parsed(words: list[str]) -> dict[str, Any]:
    """Parameters as the command line reads them; it raises for an option that it does not have."""
    name, *rest = (re.sub(r"\$\w+", "1", word) for word in words)
    group: Any = typer.main.get_command(app)
    params: dict[str, Any] = group.commands[name].make_context(name, rest).params
    return params


def test_there_are_commands_of_both_kinds_everywhere() -> None:
    assert [words[0] for words in every_command()] == ["serve", "bench", "serve", "bench", "generate", "serve"]


@pytest.mark.parametrize("words", every_command(), ids=" ".join)
def test_every_command_is_one(words: list[str]) -> None:
    params = parsed(words)
    if words[0] == "bench":
        known = {name: value for name, value in params.items() if name in BenchConfig.__dataclass_fields__}
        assert LoadPlan(BenchConfig(**known)).slo is not None
    if words[0] == "serve":
        assert params["host"] == "0.0.0.0" and params["model"] in ("smollm2-135m", model_in_the_image())
    with pytest.raises(Exception, match=r"[Nn]o such option.*--prot"):
        parsed([*words, "--prot", "1"])


def test_keys_come_by_the_variables_that_the_commands_read_and_never_as_arguments() -> None:
    group: Any = typer.main.get_command(app)
    read = {name: {p.name: p.envvar for p in group.commands[name].params}["api_key"] for name in ("serve", "bench")}
    assert read == {"serve": "NANOINFER_API_KEY", "bench": "OPENAI_API_KEY"}
    assert not [word for words in every_command() for word in words if "key" in word]
    for name, command in zip(MANIFESTS, ("serve", "bench"), strict=True):
        (container,) = containers(name)
        found = {item["name"]: item.get("valueFrom") for item in container["env"]}
        assert found[read[command]] == {"secretKeyRef": {"name": "nanoinfer-api-key", "key": "key"}}
    page = (ROOT / "book" / "deploy.md").read_text("utf8")
    assert "create secret generic nanoinfer-api-key --from-literal=key=" in page


# --- Kubernetes -----------------------------------------------------------------------


@pytest.mark.parametrize("name", MANIFESTS)
@pytest.mark.parametrize("version", ["1.30", kubernetes_validate.latest_version()])
def test_manifests_hold_to_the_schemas(name: str, version: str) -> None:
    for document in documents(name):
        kubernetes_validate.validate(document, version, strict=True)
        spoilt = {**document, "spec": {**document["spec"], "replica": 1}}
        with pytest.raises(kubernetes_validate.ValidationError, match="replica"):
            kubernetes_validate.validate(spoilt, version, strict=True)


@pytest.mark.parametrize("name", MANIFESTS)
def test_pods_can_do_little_and_write_only_where_they_must(name: str) -> None:
    spec, (container,) = pod(name), containers(name)
    assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["runAsUser"] > 0
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert spec["automountServiceAccountToken"] is False
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert set(container["resources"]) == {"requests", "limits"}
    volumes = {volume["name"] for volume in spec["volumes"] if "emptyDir" in volume}
    mounts = {mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] in volumes}
    cache = next((item["value"] for item in container["env"] if item["name"] == "NANOINFER_CACHE"), "/tmp/nanoinfer")
    assert "/tmp" in mounts and any(Path(cache).is_relative_to(mount) for mount in mounts)


def test_the_service_finds_the_server_and_the_job_finds_the_service() -> None:
    deployment, service = documents("server.yaml")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"] == service["spec"]["selector"] == labels
    (container,), (port,) = containers("server.yaml"), service["spec"]["ports"]
    assert {"name": port["targetPort"], "containerPort": 8000} in container["ports"]
    serve, bench = (parsed(next(in_manifest(name))) for name in MANIFESTS)
    assert serve["port"] == 8000
    assert bench["target"] == f"http://{service['metadata']['name']}:{port['port']}"
    away_from = pod("bench.yaml")["affinity"]["podAntiAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert away_from[0]["podAffinityTerm"]["labelSelector"]["matchLabels"] == labels
    assert documents("bench.yaml")[0]["spec"]["template"]["metadata"]["labels"] != labels
    assert containers("bench.yaml")[0]["image"] == container["image"]


def test_probes_ask_what_needs_no_key_and_an_end_leaves_time_to_drain() -> None:
    (container,) = containers("server.yaml")
    probes = [container[f"{kind}Probe"] for kind in ("startup", "readiness", "liveness")]
    assert {probe["httpGet"]["path"] for probe in probes} == set(OPEN)
    assert {probe["httpGet"]["port"] for probe in probes} == {"http"}
    drain = parsed(next(in_manifest("server.yaml")))["drain"]
    pause = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod("server.yaml")["terminationGracePeriodSeconds"] >= pause + drain + 5
    threads = next(item["value"] for item in container["env"] if item["name"] == "OMP_NUM_THREADS")
    assert container["resources"]["requests"]["cpu"] == container["resources"]["limits"]["cpu"] == threads


# --- the image ------------------------------------------------------------------------


def model_in_the_image() -> str:
    (cache,) = re.findall(r"^RUN NANOINFER_CACHE=(\S+)", (DEPLOY / "Dockerfile").read_text("utf8"), re.M)
    return f"{cache}/files/{Path(SMOLLM2.member).name}"


def test_the_image_is_made_of_what_is_there_and_runs_as_who_the_pods_are() -> None:
    text = (DEPLOY / "Dockerfile").read_text("utf8").replace("\\\n", " ")
    for line in re.findall(r"^COPY (.*)$", text, re.M):
        assert all((ROOT / source).exists() for source in line.split()[:-1])
    (base,) = re.findall(r"^FROM python:(\d\.\d+)-slim$", text, re.M)
    assert base in ("3.11", "3.12", "3.13")
    assert "--extra-index-url https://download.pytorch.org/whl/cpu" in text
    assert "https://download.pytorch.org/whl/cpu" in (ROOT / "scripts" / "install.py").read_text("utf8")
    (extras,) = re.findall(r'"\.\[(.*)\]"', text)
    assert set(extras.split(",")) == {"serve", "bench"}
    (user,) = re.findall(r"^USER (\d+):\1$", text, re.M)
    assert {pod(name)["securityContext"]["runAsUser"] for name in MANIFESTS} == {int(user)}


# --- Slurm ----------------------------------------------------------------------------


def test_every_line_for_sbatch_is_an_option_of_it() -> None:
    lines = SBATCH.read_text("utf8").splitlines()
    first = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    asked = [line for line in lines if line.startswith("#SBATCH")]
    assert asked and not [line for line in lines[first:] if line.startswith("#SBATCH")]  # sbatch stops reading there
    for line in asked:
        option = re.fullmatch(r"#SBATCH --([a-z-]+)=\S+", line)
        assert option and option[1] in SBATCH_OPTIONS, line


SRUN = """#!/bin/bash
while [[ "$1" == --* ]]; do shift; done
exec "$@"
"""
NANOINFER = """#!{python}
import http.server, json, os, signal, sys
kind, words = sys.argv[1], sys.argv[2:]
keys = {{name: os.environ.get(name) for name in ("NANOINFER_API_KEY", "OPENAI_API_KEY", "OMP_NUM_THREADS")}}
with open(kind + ".json", "w") as file:
    json.dump({{"words": words, **keys}}, file)
if kind == "bench":
    sys.exit({bench})
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
def end(*_):
    open("drained", "w").close()
    os._exit(0)
signal.signal(signal.SIGTERM, end)
{before}
http.server.HTTPServer(("127.0.0.1", int(words[words.index("--port") + 1])), Handler).serve_forever()
"""


def submit(folder: Path, bench: int = 0, before: str = "") -> subprocess.CompletedProcess[str]:
    """Run the script as the first node would, with stand-ins for Slurm's commands and for ours."""
    stubs = {"srun": SRUN, "scontrol": "#!/bin/bash\necho 127.0.0.1\necho localhost\n"}
    ours = NANOINFER.format(python=sys.executable, bench=bench, before=before)
    (folder / ".venv" / "bin").mkdir(parents=True)
    for path, text in {**{folder / n: t for n, t in stubs.items()}, folder / ".venv/bin/nanoinfer": ours}.items():
        path.write_text(text, encoding="utf-8")
        path.chmod(0o755)
    job = {"SUBMIT_DIR": str(folder), "JOB_ID": str(os.getpid()), "JOB_NODELIST": "n[1-2]", "CPUS_PER_TASK": "3"}
    environment = {f"SLURM_{name}": value for name, value in job.items()}
    environment["PATH"] = f"{folder}:{os.environ['PATH']}"
    return subprocess.run(
        ["bash", str(SBATCH)], env=environment, cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )


needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="the script asks /health with curl")


@needs_curl
def test_the_script_serves_waits_benches_and_ends_the_server(tmp_path: Path) -> None:
    done = submit(tmp_path)
    assert done.returncode == 0, done.stderr
    serve, bench = (json.loads((tmp_path / f"{kind}.json").read_text()) for kind in ("serve", "bench"))
    port = serve["words"][serve["words"].index("--port") + 1]
    assert bench["words"][0] == f"http://127.0.0.1:{port}"
    assert len(serve["NANOINFER_API_KEY"]) == 64 and bench["OPENAI_API_KEY"] == serve["NANOINFER_API_KEY"]
    assert serve["OMP_NUM_THREADS"] == "3"
    assert (tmp_path / "drained").exists()


@needs_curl
@pytest.mark.parametrize(("fault", "code"), [({"bench": 1}, 1), ({"before": "sys.exit(3)"}, 1)], ids=["bench", "serve"])
def test_a_failed_step_fails_the_job(tmp_path: Path, fault: dict[str, Any], code: int) -> None:
    assert submit(tmp_path, **fault).returncode == code
    assert (tmp_path / "bench.json").exists() == ("bench" in fault)


def test_bash_reads_the_script() -> None:
    assert subprocess.run(["bash", "-n", str(SBATCH)], check=False).returncode == 0
