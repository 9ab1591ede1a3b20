import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from ssl_sec.edges.composition.compose import compose
from ssl_sec.edges.storage.places import STAGING_VARIABLE, is_remote
from ssl_sec.edges.submit.cluster import _STOP_WITHIN_S
from ssl_sec.edges.submit.orders import expand_sweep
from ssl_sec.edges.tracking.provenance import IMAGE_COMMIT_VARIABLE
from ssl_sec.recipes.pretraining.config import PretrainConfig
from ssl_sec.recipes.probing.config import ProbeJobConfig
from ssl_sec.settings import from_values
from tests.documented import commands_in
from tests.jobs import configured

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "jobs" / "cluster"
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
CONSTRAINTS = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
IMAGES = ("Dockerfile", "jobs/cluster/mlflow.Dockerfile")
KUBERNETES = "1.34"
CREDENTIAL = re.compile(r"TOKEN$|PASSWORD|SECRET|KEY")

# The fields in KubeRay 1.7.0's CRDs (ray.io/v1): Kubernetes drops other fields silently.
RAY_CLUSTER_FIELDS = {
    *("authOptions", "autoscalerOptions", "enableInTreeAutoscaling", "gcsFaultToleranceOptions", "headGroupSpec"),
    *("headServiceAnnotations", "managedBy", "rayVersion", "suspend", "upgradeStrategy", "workerGroupSpecs"),
}
AUTH_FIELDS = {"enableK8sTokenAuth", "mode", "secretName"}
AUTOSCALER_FIELDS = {
    *("args", "command", "env", "envFrom", "idleTimeoutSeconds", "image", "imagePullPolicy", "resources"),
    *("securityContext", "upscalingMode", "version", "volumeMounts"),
}
HEAD_FIELDS = {"enableIngress", "headService", "labels", "rayStartParams", "resources", "serviceType", "template"}
WORKER_FIELDS = {
    *("groupName", "idleTimeoutSeconds", "labels", "maxReplicas", "minReplicas", "numOfHosts", "priority"),
    *("rayStartParams", "replicas", "resources", "scaleStrategy", "suspend", "template"),
}
RAY_JOB_FIELDS = {
    *("activeDeadlineSeconds", "backoffLimit", "clusterSelector", "deletionStrategy", "entrypoint", "jobId"),
    *("entrypointNumCpus", "entrypointNumGpus", "entrypointResources", "managedBy", "metadata"),
    *("preRunningDeadlineSeconds", "rayClusterSpec", "runtimeEnvYAML", "shutdownAfterJobFinishes", "submissionMode"),
    *("submitterConfig", "submitterPodTemplate", "suspend", "ttlSecondsAfterFinished"),
}


def documents(name: str) -> list[dict]:
    return list(yaml.safe_load_all((CLUSTER / name).read_text()))


COMMON = documents("kuberay-common.yaml")
(RAY_CLUSTER,) = documents("kuberay-cluster.yaml")
(RAY_JOB,) = documents("kuberay-job.yaml")
(COMPOSE,) = documents("compose.yaml")
SPEC = RAY_JOB["spec"]["rayClusterSpec"]
(WORKERS,) = SPEC["workerGroupSpecs"]
PODS = {
    "head": SPEC["headGroupSpec"]["template"]["spec"],
    "worker": WORKERS["template"]["spec"],
    "submitter": RAY_JOB["spec"]["submitterPodTemplate"]["spec"],
}


def entrypoint() -> list[tuple[str, list[str]]]:
    return commands_in(RAY_JOB["spec"]["entrypoint"])


def slurm_examples() -> list[tuple[str, list[str]]]:
    text = (CLUSTER / "slurm.sh").read_text()
    return [
        ("pretrain", shlex.split(overrides)) for overrides in re.findall(r"^#.*sbatch.*slurm\.sh (.+)$", text, re.M)
    ]


def documented() -> list[tuple[str, list[str]]]:
    text = (CLUSTER / "README.md").read_text() + (ROOT / "docs" / "cluster.md").read_text()
    examples = re.findall(r"sbatch.* jobs/cluster/slurm\.sh (.+)$", text, re.M)
    return [*commands_in(text), *(("pretrain", shlex.split(overrides)) for overrides in examples)]


@pytest.mark.parametrize("commands", [entrypoint, slurm_examples, documented])
def test_documented_commands_compose(commands):
    found = commands()
    assert found
    for job, overrides in found:
        kind = {"pretrain": PretrainConfig, "probe": ProbeJobConfig}[job]
        for point, _ in expand_sweep(overrides):
            from_values(kind, compose(job, point))


def test_core_objects_and_pods_match_kubernetes_schemas():
    for each in COMMON:
        kubernetes_validate.validate(each, KUBERNETES, strict=True)
    for name, pod in PODS.items():
        kubernetes_validate.validate(
            {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": pod}, KUBERNETES, strict=True
        )


def test_ray_objects_have_only_fields_of_kuberay():
    assert (RAY_CLUSTER["apiVersion"], RAY_CLUSTER["kind"]) == ("ray.io/v1", "RayCluster")
    assert (RAY_JOB["apiVersion"], RAY_JOB["kind"]) == ("ray.io/v1", "RayJob")
    assert RAY_JOB["spec"].keys() <= RAY_JOB_FIELDS
    assert SPEC.keys() <= RAY_CLUSTER_FIELDS
    assert SPEC["authOptions"].keys() <= AUTH_FIELDS
    assert SPEC["autoscalerOptions"].keys() <= AUTOSCALER_FIELDS
    assert SPEC["headGroupSpec"].keys() <= HEAD_FIELDS
    assert WORKERS.keys() <= WORKER_FIELDS


def test_the_permanent_cluster_equals_that_of_the_job():
    assert RAY_CLUSTER["spec"] == SPEC


def test_ray_has_the_version_of_the_image_and_requires_the_token():
    assert SPEC["rayVersion"] == CONSTRAINTS["ray"]
    assert SPEC["authOptions"] == {"mode": "token", "secretName": "ssl-sec-ray-token"}


def test_objects_that_the_pods_refer_to_exist():
    existing = {(each["kind"], each["metadata"]["name"]) for each in COMMON}
    secrets = set(re.findall(r"create secret generic ([\w-]+)", (CLUSTER / "README.md").read_text()))
    assert SPEC["authOptions"]["secretName"] in secrets
    for pod in PODS.values():
        assert ("ServiceAccount", pod["serviceAccountName"]) in existing
        for source in pod["containers"][0].get("envFrom", []):
            if "secretRef" in source:
                assert source["secretRef"]["name"] in secrets
            else:
                assert ("ConfigMap", source["configMapRef"]["name"]) in existing


@pytest.mark.parametrize("name", PODS)
def test_a_pod_has_minimal_permissions(name):
    pod = PODS[name]
    context = pod["securityContext"]
    assert context["runAsNonRoot"] and context["runAsUser"] > 0 and context["runAsGroup"] > 0
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    # Only the autoscaler in the head's pod uses the Kubernetes API, to change the cluster's size.
    assert pod.get("automountServiceAccountToken", True) == (name == "head")
    (container,) = pod["containers"]
    assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert container["image"].endswith(f":{VERSION}")
    for bound in ("requests", "limits"):
        assert container["resources"][bound].keys() >= {"cpu", "memory"}


@pytest.mark.parametrize("name", ["kuberay-cluster.yaml", "kuberay-job.yaml"])
def test_the_lines_for_spot_machines_can_be_uncommented(name):
    text = re.sub(r"# (.*cloud\.google\.com/gke-spot.*)", r"\1", (CLUSTER / name).read_text())
    spec = yaml.safe_load(text)["spec"]
    (workers,) = spec.get("rayClusterSpec", spec)["workerGroupSpecs"]
    pod = workers["template"]["spec"]
    assert [each["key"] for each in pod["tolerations"]] == ["nvidia.com/gpu", "cloud.google.com/gke-spot"]
    assert pod["nodeSelector"] == {"cloud.google.com/gke-spot": "true"}
    assert text.count(" tolerations:") == 1


def test_prometheus_scrapes_every_ray_pod_where_kuberay_has_ray_export_its_metrics():
    port = 8080  # KubeRay's default of --metrics-export-port
    (monitor,) = pod_monitors()
    assert monitor["spec"]["podMetricsEndpoints"][0]["port"] == "metrics"
    for group in (SPEC["headGroupSpec"], WORKERS):
        assert "metrics-export-port" not in group["rayStartParams"]
        template = group["template"]
        assert template["metadata"]["annotations"] == {
            "prometheus.io/scrape": "true",
            "prometheus.io/port": str(port),
            "prometheus.io/path": monitor["spec"]["podMetricsEndpoints"][0]["path"],
        }
        assert {"name": "metrics", "containerPort": port} in template["spec"]["containers"][0]["ports"]


def pod_monitors() -> list[dict]:
    """The objects for the Prometheus operator, which are in comments."""
    text = (CLUSTER / "kuberay-common.yaml").read_text()
    (commented,) = re.findall(r"(?m)^# With the Prometheus operator.*\n((?:# .*\n)+)", text)
    return list(yaml.safe_load_all(re.sub("(?m)^# ", "", commented)))


def test_the_run_fits_the_cluster_and_needs_no_folder_that_pods_share():
    ((_, overrides),) = entrypoint()
    config = configured("pretrain", overrides)
    assert config.runtime.num_workers == (WORKERS["minReplicas"], WORKERS["maxReplicas"])
    assert WORKERS["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "1"
    for name in ("head", "worker"):
        (mount,), (volume,) = PODS[name]["containers"][0]["volumeMounts"], PODS[name]["volumes"]
        assert "emptyDir" in volume and volume["name"] == mount["name"]
        assert Path(config.data.root).is_relative_to(mount["mountPath"]) and config.data.download
        (storage,) = [each["data"] for each in COMMON if each["metadata"]["name"] == "ssl-sec-storage"]
        assert Path(storage[STAGING_VARIABLE]).is_relative_to(mount["mountPath"])
    assert is_remote(config.output_dir)


@pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")  # Ray's command line imports Ray Serve
def test_a_preempted_worker_drains_its_node_in_time():
    from ray.scripts.scripts import drain_node

    (container,) = PODS["worker"]["containers"]
    *shell, script = container["lifecycle"]["preStop"]["exec"]["command"]
    assert shell == ["bash", "-c"]
    drain, _, rest = script.partition(" && ")
    words = shlex.split(drain)
    assert words[0] == "timeout" and words[2:4] == ["ray", "drain-node"]
    deadline_s = drain_node.make_context("drain-node", words[4:]).params["deadline_remaining_seconds"]
    assert rest == f"sleep {deadline_s}"
    assert int(words[1]) + deadline_s < PODS["worker"]["terminationGracePeriodSeconds"]
    subprocess.run(["shellcheck", "--shell=bash", "-"], input=script, text=True, check=True, env=with_tools())


def test_a_stopped_job_may_take_as_long_as_one_that_was_submitted():
    (container,) = PODS["head"]["containers"]
    variables = {each["name"]: each["value"] for each in container["env"]}
    assert variables["RAY_JOB_STOP_WAIT_TIME_S"] == str(_STOP_WITHIN_S)
    assert PODS["head"]["terminationGracePeriodSeconds"] > _STOP_WITHIN_S


def test_no_credentials_are_in_the_files():
    assert "Secret" not in {each["kind"] for each in COMMON}
    literal = []
    for pod in PODS.values():
        literal += [each["name"] for each in pod["containers"][0].get("env", []) if "value" in each]
    literal += [name for each in COMMON if each["kind"] == "ConfigMap" for name in each["data"]]
    for service in COMPOSE["services"].values():
        values = service.get("environment", {})
        literal += [name for name, value in values.items() if not re.fullmatch(r"\$\{\w+:\?.+\}", str(value))]
    for line in (CLUSTER / ".env.example").read_text().splitlines():
        name, _, value = line.partition("=")
        literal += [name] if value and not line.startswith("#") else []
    assert literal and not [name for name in literal if CREDENTIAL.search(name)]
    assert not re.search(r"://[^/\s$]+:[^/\s$]+@", (CLUSTER / "compose.yaml").read_text())
    assert "*.env" in (ROOT / ".gitignore").read_text().splitlines()


def test_the_compose_file_matches_the_specification():
    command = ["check-jsonschema", "--builtin-schema", "vendor.compose-spec", str(CLUSTER / "compose.yaml")]
    result = subprocess.run(command, capture_output=True, text=True, env=with_tools())
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("name", COMPOSE["services"])
def test_a_service_is_pinned_limited_and_hardened(name):
    service = COMPOSE["services"][name]
    assert re.search(r":v?\d+\.\d+[\w.-]*$", service["image"])
    assert int(service["user"].partition(":")[0]) > 0
    assert service["cap_drop"] == ["ALL"] and service["security_opt"] == ["no-new-privileges:true"]
    assert {"mem_limit", "cpus", "healthcheck", "restart"} <= service.keys()
    for port in service.get("ports", []):
        assert port.startswith("127.0.0.1:")
    for dependency in service.get("depends_on", {}).values():
        assert dependency == {"condition": "service_healthy"}


def test_only_mlflow_reaches_the_stores():
    inside = {name for name, network in COMPOSE["networks"].items() if network.get("internal")}
    for name, service in COMPOSE["services"].items():
        assert name == "mlflow" or set(service["networks"]) <= inside
        assert name == "mlflow" or "ports" not in service


def test_the_example_environment_has_every_variable():
    used = set(re.findall(r"\$\{(\w+)", (CLUSTER / "compose.yaml").read_text()))
    lines = (CLUSTER / ".env.example").read_text().splitlines()
    assert used == {line.partition("=")[0] for line in lines if line and not line.startswith("#")}


def test_the_options_of_mlflow_are_those_of_its_server():
    from mlflow.cli import server

    service = COMPOSE["services"]["mlflow"]
    assert service["image"].endswith(":" + CONSTRAINTS["mlflow"])
    assert service["command"][:2] == ["mlflow", "server"]
    options = server.make_context("server", list(service["command"][2:])).params
    assert (
        options["artifacts_destination"]
        == "s3://" + COMPOSE["services"]["objects"]["environment"]["S3_BUCKET"] + "/artifacts"
    )
    assert options["app_name"] == "basic-auth"


def with_tools(**more: str) -> dict[str, str]:
    """The environment with the tools that are installed next to Python."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**os.environ, "PATH": path, **more}


@pytest.mark.parametrize("path", IMAGES)
def test_a_dockerfile_is_clean_and_does_not_end_as_root(path):
    result = subprocess.run(
        ["hadolint", "--no-color", path], cwd=ROOT, capture_output=True, text=True, env=with_tools()
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.findall(r"^USER (.*)$", (ROOT / path).read_text(), re.M)[-1] == "1000:1000"


def test_the_image_has_a_home_that_every_user_can_write_to():
    text = (ROOT / "Dockerfile").read_text()
    (home,) = re.findall(r"^ENV HOME=(\S+)", text, re.M)
    assert re.findall(r"^WORKDIR (.*)$", text, re.M)[-1] == home
    assert f"chmod 1777 {home}\n" in text


def test_the_image_tells_its_runs_the_commit():
    text = (ROOT / "Dockerfile").read_text()
    assert "ARG REVISION=unknown\n" in text and f"\nENV {IMAGE_COMMIT_VARIABLE}=${{REVISION}}\n" in text


def test_the_images_have_the_same_pinned_python():
    text = (ROOT / "Dockerfile").read_text()
    (image,) = re.findall(r"^ARG PYTHON_IMAGE=(.*)$", text, re.M)
    assert re.fullmatch(r"python:3\.\d+\.\d+-slim-\w+", image)
    assert re.findall("^FROM (.*)$", (CLUSTER / "mlflow.Dockerfile").read_text(), re.M) == [image]


def test_the_images_pin_the_versions_of_constraints_txt():
    pinned = re.findall(r"([\w.-]+)==([\w.]+)", "".join((ROOT / path).read_text() for path in IMAGES))
    assert all(CONSTRAINTS.get(name.lower(), version) == version for name, version in pinned)


def test_the_readme_installs_what_mlflow_needs_to_change_permissions():
    (server,) = re.findall(r"Flask-WTF==[\d.]+", (CLUSTER / "mlflow.Dockerfile").read_text())
    (client,) = re.findall(r"`pip install (Flask-WTF==[\d.]+)`", (CLUSTER / "README.md").read_text())
    assert client == server


def test_each_variant_installs_torch_and_torchvision_from_one_index():
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    variants = re.findall(r"^FROM system AS torch-(\w+)\nRUN .*?pip install (.*)$", text, re.M)
    assert {name for name, _ in variants} == {"cuda", "cpu"}
    for _, arguments in variants:
        assert arguments.split()[-2:] == ["torch", "torchvision"]
        assert "--constraint constraints.txt" in arguments


def test_the_build_context_has_only_what_is_copied():
    ignore = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert ignore[0] == "*"
    included = {line[1:] for line in ignore if line.startswith("!")}
    copied = set()
    for path in IMAGES:
        for sources in re.findall(r"^COPY (.*) \S+$", (ROOT / path).read_text(), re.M):
            copied |= set(sources.split())
    assert copied == included
    assert all((ROOT / each).exists() for each in copied)
    assert {"**/.env*", "**/*.env"} <= set(ignore)
