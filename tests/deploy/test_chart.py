"""Tests the Helm chart: for each file of values, the Kubernetes API accepts the objects, and the
objects fit together."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from moonpool.api.metrics.catalogue import CATALOGUE
from moonpool.config.parse import parse_config
from moonpool.discovery.endpoint import labelled_endpoint
from tests.deploy.chart import (
    CHART,
    NAMESPACE,
    ROOT,
    VALUES,
    Manifest,
    containers,
    of_kind,
    render,
    selects,
    values_of,
    workloads,
)

KUBERNETES = "1.37"
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
DEFAULTS = yaml.safe_load((CHART / "values.yaml").read_text())


def _closed(**fields: Any) -> dict[str, Any]:
    """Returns a schema of an object that has these fields; a field with a "!" is required."""
    return {
        "type": "object",
        "properties": {name.removesuffix("_"): kind for name, kind in fields.items()},
        "required": [name.removesuffix("_") for name in fields if name.endswith("_")],
        "additionalProperties": False,
    }


TEXT, NUMBER = {"type": "string", "minLength": 1}, {"type": "integer"}
LABELS = {"type": "object", "additionalProperties": {"type": "string"}}
SELECTOR = _closed(matchLabels_=LABELS)
OTHERS = {
    "InferencePool": _closed(
        selector_=SELECTOR,
        targetPorts_={"type": "array", "minItems": 1, "items": _closed(number_=NUMBER)},
        endpointPickerRef=_closed(
            name_=TEXT,
            port=_closed(number_=NUMBER),
            failureMode={"enum": ["FailOpen", "FailClose"]},
        ),
    ),
    "PodMonitor": _closed(
        selector_=SELECTOR,
        podMetricsEndpoints_={
            "type": "array",
            "items": _closed(
                port_=TEXT,
                path=TEXT,
                interval=TEXT,
                scheme={"enum": ["http", "https"]},
                tlsConfig=_closed(
                    serverName=TEXT, ca=_closed(secret=_closed(name_=TEXT, key_=TEXT))
                ),
                relabelings={"type": "array", "items": _closed(targetLabel=TEXT, replacement=TEXT)},
            ),
        },
    ),
    "ScaledObject": _closed(
        scaleTargetRef_=_closed(apiVersion=TEXT, kind=TEXT, name_=TEXT),
        minReplicaCount=NUMBER,
        maxReplicaCount=NUMBER,
        pollingInterval=NUMBER,
        fallback=_closed(failureThreshold_=NUMBER, replicas_=NUMBER, behavior=TEXT),
        advanced=_closed(horizontalPodAutoscalerConfig=_closed(behavior={"type": "object"})),
        triggers_={
            "type": "array",
            "items": _closed(
                type_={"const": "prometheus"},
                metricType={"enum": ["AverageValue", "Value"]},
                metadata_=_closed(
                    serverAddress_=TEXT, query_=TEXT, threshold_=TEXT, ignoreNullValues=TEXT
                ),
            ),
        },
    ),
}
"""The fields that the chart uses of custom resources, from their documentation: the Gateway API
inference extension v1, the Prometheus operator, KEDA."""

each_values = pytest.mark.parametrize("path", VALUES, ids=lambda path: path.stem)


@each_values
def test_the_api_accepts_every_object(path: Path) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    jsonschema = pytest.importorskip("jsonschema")
    manifests = render(values_of(path))
    for manifest in manifests:
        assert manifest["metadata"]["namespace"] == NAMESPACE
        if manifest["kind"] in OTHERS:
            jsonschema.validate(manifest["spec"], OTHERS[manifest["kind"]])
        else:
            kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
    names = [(each["kind"], each["metadata"]["name"]) for each in manifests]
    assert len(set(names)) == len(names)
    assert all(len(name) <= 63 for _, name in names)


def test_an_unknown_field_is_found() -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    deployment = of_kind(render({}), "Deployment")[0]
    deployment["spec"]["replica"] = 2
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(deployment, KUBERNETES, strict=True)


def test_there_are_eight_value_files_which_show_every_switch() -> None:
    assert len(VALUES) == 8
    used = " ".join(path.read_text() for path in VALUES)
    for name, value in DEFAULTS.items():
        if isinstance(value, dict) and value.get("enabled") is False:
            assert re.search(rf"^{name}:(?s:.)*?enabled: true", used, re.M), name


@each_values
def test_what_objects_name_is_there(path: Path) -> None:
    """Whether services, budgets, policies and scalers reach pods, and volumes have what containers
    mount."""
    manifests = render(values_of(path))
    pods = [each["spec"]["template"] for each in workloads(manifests)]
    for each in of_kind(manifests, "Service"):
        reached = [p for p in pods if selects(each["spec"]["selector"], p["metadata"]["labels"])]
        (pod,) = reached
        ports = {port["name"] for c in pod["spec"]["containers"] for port in c["ports"]}
        assert {port["targetPort"] for port in each["spec"]["ports"]} <= ports
    for each in of_kind(manifests, "PodDisruptionBudget", "NetworkPolicy", "PodMonitor"):
        selector = each["spec"].get("selector") or each["spec"]["podSelector"]
        assert any(selects(selector["matchLabels"], p["metadata"]["labels"]) for p in pods)
    for each in of_kind(manifests, "HorizontalPodAutoscaler", "ScaledObject"):
        target = each["spec"]["scaleTargetRef"]
        (found,) = [
            one
            for one in of_kind(manifests, target["kind"])
            if one["metadata"]["name"] == target["name"]
        ]
        assert "replicas" not in found["spec"], "an upgrade would reset what the scaler chose"
    for workload in workloads(manifests):
        pod = workload["spec"]["template"]["spec"]
        claims = workload["spec"].get("volumeClaimTemplates", ())
        volumes = {one["name"] for one in pod["volumes"]} | {c["metadata"]["name"] for c in claims}
        mounts = [mount["name"] for c in containers(workload) for mount in c["volumeMounts"]]
        assert set(mounts) == volumes


@each_values
def test_pods_are_closed_probed_and_given_time_to_drain(path: Path) -> None:
    values = values_of(path)
    for workload in workloads(render(values)):
        pod = workload["spec"]["template"]["spec"]
        drain_s = values.get("drainSeconds", DEFAULTS["drainSeconds"])
        assert pod["terminationGracePeriodSeconds"] > drain_s + 10
        assert pod.get("automountServiceAccountToken") is False or "serviceAccountName" in pod
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in containers(workload):
            security = container["securityContext"]
            assert security["allowPrivilegeEscalation"] is False
            assert security["capabilities"] == {"drop": ["ALL"]}
            line = " ".join([*container["command"], *container["args"]])
            assert "preStop" not in container.get("lifecycle", {})
            assert not re.search(r"sk-|secret=|api-key=", line), "visible to all of the machine"
            if container["name"].partition("-")[0] in ("head", "worker"):
                paths = [
                    container[f"{kind}Probe"]["httpGet"]["path"]
                    for kind in ("startup", "liveness", "readiness")
                ]
                assert paths == ["/live", "/live", "/ready"]
                assert f"--drain-seconds={drain_s}" in container["args"]


def test_only_pods_of_the_release_reach_workers_and_servers() -> None:
    values = values_of(CHART / "ci" / "closed-values.yaml")
    policies = of_kind(render(values), "NetworkPolicy")
    by_name = {each["metadata"]["name"]: each["spec"] for each in policies}
    (rule,) = by_name["demo-moonpool-release"]["ingress"]
    (peer,) = rule["from"]
    assert peer == {"podSelector": by_name["demo-moonpool-release"]["podSelector"]}
    (rule,) = by_name["demo-moonpool-clients"]["ingress"]
    assert rule["from"] == values["networkPolicy"]["clients"]
    assert [port["port"] for port in rule["ports"]] == ["http"]


@pytest.mark.long
def test_workers_and_labels_of_a_server_name_its_ranks_and_events() -> None:
    """Whether each rank has its own ports and a worker that knows them, and the picker reads the
    labels."""
    values = values_of(CHART / "ci" / "gateway-values.yaml")
    for ranks, follows in ((1, True), (1, False), (64, True), (2, False)):
        values["vllm"] = {"mixed": {"replicas": 1, "ranks": ranks}, "kvEvents": follows}
        rendered = workloads(render(values))
        (server,) = [each for each in rendered if "vllm" in each["metadata"]["name"]]
        labels = server["spec"]["template"]["metadata"]["labels"]
        found = labelled_endpoint("a", "127.0.0.1", 8100, labels)
        assert found is not None and found.num_ranks == ranks
        vllm, *workers = containers(server)
        lines = [dict(word.split("=", 1) for word in one["args"][1:]) for one in workers]
        assert [line["--vllm"] for line in lines] == [each.place for each in found.ranks()]
        ports = [port["containerPort"] for one in workers for port in one["ports"]]
        assert [int(line["--health"].rpartition(":")[2]) for line in lines] == ports
        assert len({line["--name"] for line in lines}) == len(set(ports)) == ranks
        told = [word for word in vllm["args"] if "--kv-events-config" in word]
        own = [f"tcp://*:{port}" for port in (found.events_port, found.replay_port)]
        assert bool(told) == follows and all(port in told[0] for port in own if follows)
        assert (f"--data-parallel-size={ranks}" in vllm["args"]) == (ranks > 1)
        events = {port for each in found.ranks() for port in (each.events_port, each.replay_port)}
        assert len(events) == 2 * ranks or not follows


def test_prometheus_reaches_the_metrics_of_head_and_picker() -> None:
    values = values_of(CHART / "ci" / "gateway-values.yaml")
    manifests = render(values)
    pods = [each["spec"]["template"] for each in workloads(manifests)]
    jobs = {}
    for each in of_kind(manifests, "PodMonitor"):
        (endpoint,) = each["spec"]["podMetricsEndpoints"]
        wanted = each["spec"]["selector"]["matchLabels"]
        (pod,) = [one for one in pods if selects(wanted, one["metadata"]["labels"])]
        names = {port["name"] for one in pod["spec"]["containers"] for port in one["ports"]}
        assert endpoint["port"] in names
        jobs[endpoint["relabelings"][0]["replacement"]] = wanted, endpoint["port"]
    assert set(jobs) == {"moonpool", "moonpool-epp"}
    for wanted, port in jobs.values():
        rules = [
            rule
            for each in of_kind(manifests, "NetworkPolicy")
            if each["spec"]["podSelector"]["matchLabels"] == wanted
            for rule in each["spec"]["ingress"]
            if {"port": port, "protocol": "TCP"} in rule.get("ports", ())
        ]
        assert values["podMonitor"]["from"] in [rule.get("from") for rule in rules]
    watched = (ROOT / "deploy/prometheus/moonpool.rules.yml").read_text()
    watched += (ROOT / "deploy/grafana/moonpool.json").read_text()
    assert set(re.findall(r'job=\\?"([\w-]+)', watched)) == set(jobs)


def test_metrics_of_a_closed_head_are_not_opened_to_all() -> None:
    """Without a peer that may read metrics (`podMonitor.from`), no policy opens them: only clients
    reach the port, which the API shares."""
    policies = of_kind(render({"podMonitor": {"enabled": True}}), "NetworkPolicy")
    assert not [each for each in policies if each["metadata"]["name"].endswith("-metrics")]


def test_head_and_picker_have_the_same_service_levels() -> None:
    values = values_of(CHART / "ci" / "gateway-values.yaml")
    lines = [c["args"] for each in workloads(render(values)) for c in containers(each)]
    flags = [[word for word in line if word.startswith("--slo")] for line in lines]
    wanted = ["--slo-ttft=300", "--slo-class=chat=120,10"]
    assert [found for found in flags if found] == [wanted, wanted]


def test_secrets_that_the_chart_makes_differ_each_time_and_are_none_where_they_exist() -> None:
    first, second = (of_kind(render({}), "Secret") for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert one["data"] != other["data"]
    assert not of_kind(render(values_of(CHART / "ci" / "closed-values.yaml")), "Secret")


def test_scalers_ask_for_a_metric_that_the_head_has() -> None:
    manifests = render(values_of(CHART / "ci" / "keda-values.yaml"))
    for each in of_kind(manifests, "ScaledObject"):
        (trigger,) = each["spec"]["triggers"]
        (name,) = re.findall(r"moonpool:\w+", trigger["metadata"]["query"])
        assert name in {metric.name for metric in CATALOGUE}
    (config,) = [m for m in of_kind(manifests, "ConfigMap") if "moonpool.toml" in m["data"]]
    assert "autoscale = true" in config["data"]["moonpool.toml"], "else it exports none"


def test_dashboard_and_alerts_are_those_of_deploy() -> None:
    manifests = of_kind(render(values_of(CHART / "ci" / "keda-values.yaml")), "ConfigMap")
    data = {key: text for each in manifests for key, text in each["data"].items()}
    for key, path in (
        ("moonpool.json", "grafana/moonpool.json"),
        ("moonpool.rules.yml", "prometheus/moonpool.rules.yml"),
    ):
        assert data[key].strip() == (ROOT / "deploy" / path).read_text().strip()


# Values:

NONSENSE: list[tuple[dict[str, Any], str]] = [
    ({"modle": "x"}, "modle"),
    ({"engine": "tgi"}, "engine"),
    ({"workers": {"prefill": {"replicas": -1}}}, "minimum"),
    ({"vllm": {"mixed": {"replica": 2}}}, "replica"),
    ({"head": {"service": {"port": 0}}}, "minimum"),
    ({"config": {"slo": 3}}, "slo"),
    ({"engine": "vllm"}, "needs `model`"),
    ({"autoscaling": {"enabled": True}, "workers": {"mixed": {"replicas": 1}}}, "mixed"),
    ({"epp": {"enabled": True}}, "set engine to vllm"),
    ({"slo": {"ttft": 0}}, "ttft"),
    ({"slo": {"classes": {"chat": {"ttft": 2}}}}, "tbt"),
    ({"slo": {"classes": {"a=b": {"ttft": 2, "tbt": 0.1}}}}, "a=b"),
]


@pytest.mark.parametrize(("values", "said"), NONSENSE, ids=lambda value: str(value)[:40])
def test_values_that_mean_nothing_are_refused(values: dict[str, Any], said: str) -> None:
    helm = pytest.importorskip("helm_python")
    with pytest.raises(helm.HelmError, match=said):
        render(values)


def _fields(schema: dict[str, Any]) -> dict[str, Any]:
    name = schema.get("$ref", "").rpartition("/")[2]
    found: dict[str, Any] = (SCHEMA["definitions"][name] if name else schema).get("properties", {})
    return found


def test_values_and_schema_have_the_same_names() -> None:
    """Whether the names in values.yaml are in the schema, and the names of the schema's first two
    levels are in values.yaml."""
    assert set(SCHEMA["properties"]) - {"global"} == set(DEFAULTS)
    for name, value in DEFAULTS.items():
        fields = _fields(SCHEMA["properties"][name])
        if isinstance(value, dict) and fields:
            optional = {"nodeSelector", "tolerations", "affinity", "labels"}
            assert set(value) <= set(fields), name
            assert set(fields) - set(value) <= optional, name


def test_the_readme_installs_as_the_guide_and_names_each_set() -> None:
    readme, guide = ((ROOT / name).read_text() for name in (CHART / "README.md", "docs/cluster.md"))
    begin = "podman build"
    install = guide[guide.index(begin) : guide.index("```", guide.index(begin))]
    assert install in readme
    assert set(re.findall(r"`ci/(.*?)`", readme)) == {path.name for path in VALUES}


def test_every_value_has_a_comment() -> None:
    lines = (CHART / "values.yaml").read_text().splitlines()
    for number, line in enumerate(lines):
        if re.match(r"\w+:", line):
            above = lines[number - 1]
            assert above.startswith("#"), line


def test_a_configuration_is_toml_that_the_head_reads() -> None:
    import tomllib

    config = {
        "slo": {
            "ttft_s": 2,
            "classes": [
                {"name": "chat", "ttft_s": 2.5, "tbt_s": 0.1},
                {"name": 'a "quoted" one', "ttft_s": 3, "tbt_s": 1},
            ],
        },
        "conductor": {"replicate": False, "placement": "cache-aware"},
        "api": {"allowed_origins": ["https://a.example"]},
        "engine": {"speculative_config": {"method": "ngram", "prompt_lookup_max": 4}},
        "telemetry": {"log_level": "debug"},
    }
    found = of_kind(render({"config": config}), "ConfigMap")[0]["data"]["moonpool.toml"]
    read = tomllib.loads(found)
    assert read["telemetry"].pop("log_format") == "json"
    assert read == config
    assert [one.name for one in parse_config(found).slo.classes] == ["chat", 'a "quoted" one']


def _labels_of(manifest: Manifest) -> dict[str, str]:
    found: dict[str, str] = manifest["metadata"]["labels"]
    return found


def test_names_and_labels_follow_the_release() -> None:
    for manifest in render({}):
        assert manifest["metadata"]["name"].startswith("demo-moonpool")
        assert _labels_of(manifest)["app.kubernetes.io/instance"] == "demo"
