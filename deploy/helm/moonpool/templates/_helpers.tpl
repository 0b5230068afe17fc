{{- define "moonpool.fullname" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- /* What a component is selected by: (dict "root" $ "component" "head") */ -}}
{{- define "moonpool.selector" -}}
app.kubernetes.io/name: moonpool
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "moonpool.labels" -}}
{{ include "moonpool.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end -}}

{{- define "moonpool.meta" -}}
name: {{ include "moonpool.fullname" .root }}-{{ .component }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "moonpool.labels" . | nindent 2 }}
{{- end -}}

{{- define "moonpool.image" -}}
image: {{ .image.repository }}:{{ .image.tag | default .root.Chart.AppVersion }}
imagePullPolicy: {{ .image.pullPolicy }}
{{- end -}}

{{- define "moonpool.secretName" -}}
{{ .Values.clusterSecret.existingSecret | default (printf "%s-cluster" (include "moonpool.fullname" .)) }}
{{- end -}}

{{- define "moonpool.authName" -}}
{{ .Values.auth.existingSecret | default (printf "%s-auth" (include "moonpool.fullname" .)) }}
{{- end -}}

{{- define "moonpool.checks" -}}
{{- if and (eq .Values.engine "vllm") (or (hasPrefix "moonpool/" .Values.model) (not .Values.model)) -}}
{{- fail "engine vllm needs `model`: a Hugging Face id or a folder that vLLM can serve" -}}
{{- end -}}
{{- if and .Values.autoscaling.enabled (gt (int (dig "mixed" "replicas" 0 (ternary .Values.vllm .Values.workers (eq .Values.engine "vllm")))) 0) -}}
{{- fail "autoscaling counts prefill and decode instances: set the replicas of mixed to 0" -}}
{{- end -}}
{{- if and .Values.epp.enabled (ne .Values.engine "vllm") -}}
{{- fail "epp picks among vLLM servers: set engine to vllm" -}}
{{- end -}}
{{- end -}}

{{- /* A value in a line of TOML, which has JSON's scalars, and tables of its own in lists. */ -}}
{{- define "moonpool.tomlValue" -}}
{{- if kindIs "map" . -}}
{ {{- $first := true }}{{ range $key, $value := . }}{{ if not $first }},{{ end }} {{ $key }} = {{ include "moonpool.tomlValue" $value }}{{ $first = false }}{{ end }} }
{{- else if kindIs "slice" . -}}
[{{ range $number, $value := . }}{{ if $number }}, {{ end }}{{ include "moonpool.tomlValue" $value }}{{ end }}]
{{- else -}}
{{- . | toJson -}}
{{- end -}}
{{- end -}}

{{- /* Tables of TOML: scalars and lists first, then the tables below. TOML has no null. */ -}}
{{- define "moonpool.toml" -}}
{{- $tables := .tables -}}{{- $prefix := .prefix -}}
{{- range $key, $value := $tables }}{{ if not (or (kindIs "map" $value) (kindIs "invalid" $value)) }}
{{ $key }} = {{ include "moonpool.tomlValue" $value }}
{{- end }}{{ end }}
{{- range $key, $value := $tables }}{{ if kindIs "map" $value }}
[{{ $prefix }}{{ $key }}]
{{- include "moonpool.toml" (dict "tables" $value "prefix" (printf "%s%s." $prefix $key)) }}
{{ end }}{{ end }}
{{- end -}}

{{- /* The configuration of the head: `config`, and what other values say. */ -}}
{{- define "moonpool.config" -}}
{{- $own := dict "telemetry" (dict "log_format" "json") -}}
{{- if eq .Values.engine "vllm" }}{{ $_ := set $own "engine" (dict "kind" "vllm") }}{{ end -}}
{{- if and (eq .Values.engine "moonpool") (dig "attention" "replicas" 0 .Values.workers) -}}
{{- $_ := set $own "cluster" (dict "attention" .Values.workers.attention.replicas) -}}
{{- end -}}
{{- range $role, $values := .Values.workers }}{{ if and (eq $.Values.engine "moonpool") (dig "ssd" "size" "" $values) -}}
{{- $_ := set $own "pool" (dict "ssd_folder" "/ssd") -}}
{{- end }}{{ end -}}
{{- if .Values.autoscaling.enabled }}{{ $_ := set $own "conductor" (dict "autoscale" true) }}{{ end -}}
{{- if .Values.servedModelName }}{{ $_ := set $own "model" (dict "served_name" .Values.servedModelName) }}{{ end -}}
{{- include "moonpool.toml" (dict "tables" (mergeOverwrite $own (deepCopy .Values.config)) "prefix" "") -}}
{{- end -}}

{{- /* The service levels of head and picker. */ -}}
{{- define "moonpool.sloArgs" -}}
{{- with .Values.slo.ttft }}
- --slo-ttft={{ . }}
{{- end }}
{{- with .Values.slo.tbt }}
- --slo-tbt={{ . }}
{{- end }}
{{- range $name, $levels := .Values.slo.classes }}
- {{ printf "--slo-class=%s=%v,%v" $name $levels.ttft $levels.tbt | quote }}
{{- end }}
{{- end -}}

{{- define "moonpool.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "moonpool.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{- define "moonpool.env" -}}
- {name: HOME, value: /var/cache/moonpool}
- {name: HF_HOME, value: /var/cache/moonpool}
- {name: MOONPOOL_LOG_FORMAT, value: json}
{{- if .Values.huggingFace.existingSecret }}
- name: HF_TOKEN
  valueFrom: {secretKeyRef: {name: {{ .Values.huggingFace.existingSecret }}, key: token}}
{{- end }}
{{- end -}}

{{- define "moonpool.secretEnv" -}}
- name: MOONPOOL_CLUSTER_SECRET
  valueFrom: {secretKeyRef: {name: {{ include "moonpool.secretName" . }}, key: secret}}
{{- end -}}

{{- define "moonpool.mounts" -}}
- {name: cache, mountPath: /var/cache/moonpool}
- {name: tmp, mountPath: /tmp}
{{- if .Values.models.existingClaim }}
- {name: models, mountPath: {{ .Values.models.mountPath }}, readOnly: true}
{{- end }}
{{- end -}}

{{- define "moonpool.volumes" -}}
- name: tmp
  emptyDir: {}
- name: cache
  {{- if .Values.cache.existingClaim }}
  persistentVolumeClaim: {claimName: {{ .Values.cache.existingClaim }}}
  {{- else }}
  emptyDir: {sizeLimit: {{ .Values.cache.sizeLimit }}}
  {{- end }}
{{- if .Values.models.existingClaim }}
- name: models
  persistentVolumeClaim: {claimName: {{ .Values.models.existingClaim }}, readOnly: true}
{{- end }}
{{- end -}}

{{- define "moonpool.peerTlsArgs" -}}
- --cluster-ssl-certfile=/etc/moonpool/cluster-tls/tls.crt
- --cluster-ssl-keyfile=/etc/moonpool/cluster-tls/tls.key
- --cluster-ssl-ca-certs=/etc/moonpool/cluster-tls/ca.crt
{{- end -}}

{{- define "moonpool.secretVolume" -}}
- name: {{ .name }}
  secret: {secretName: {{ .secret }}, defaultMode: 0440}
{{- end -}}

{{- /* A pod's place: (dict "place" .Values.head) */ -}}
{{- define "moonpool.placed" -}}
{{- with .nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "moonpool.probes" -}}
startupProbe:
  httpGet: {path: /live, port: {{ .port }}{{ with .scheme }}, scheme: {{ . }}{{ end }}}
  periodSeconds: 5
  failureThreshold: {{ div .startSeconds 5 }}
livenessProbe:
  httpGet: {path: /live, port: {{ .port }}{{ with .scheme }}, scheme: {{ . }}{{ end }}}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
readinessProbe:
  httpGet: {path: /ready, port: {{ .port }}{{ with .scheme }}, scheme: {{ . }}{{ end }}}
  periodSeconds: 5
  timeoutSeconds: 3
  failureThreshold: 2
{{- end -}}

{{- /* The container that joins the head: (dict "root" $ "role" "decode" "extra" list "resources" map); beside
       a server with several data-parallel ranks one for each: "rank" 0 "ranked" true */ -}}
{{- define "moonpool.worker" -}}
{{- $suffix := ternary "" (printf "-%v" .rank) (empty .rank) }}
- name: worker{{ $suffix }}
  {{- include "moonpool.image" (dict "root" .root "image" .root.Values.image) | nindent 2 }}
  command: [moonpool]
  args:
    - worker
    - --role={{ .role }}
    - --name=$(POD_NAME){{ if .ranked }}.{{ .rank }}{{ end }}
    - --head={{ include "moonpool.fullname" .root }}-head:8001
    - --health=0.0.0.0:{{ add 8002 (.rank | default 0) }}
    - --drain-seconds={{ .root.Values.drainSeconds }}
    {{- if .root.Values.tls.clusterSecret }}
    {{- include "moonpool.peerTlsArgs" . | nindent 4 }}
    {{- end }}
    {{- range .extra }}
    - {{ . | quote }}
    {{- end }}
  env:
    - name: POD_NAME
      valueFrom: {fieldRef: {fieldPath: metadata.name}}
    {{- include "moonpool.secretEnv" .root | nindent 4 }}
    {{- include "moonpool.env" .root | nindent 4 }}
    {{- with .env }}{{ toYaml . | nindent 4 }}{{ end }}
  ports:
    - {name: health{{ $suffix }}, containerPort: {{ add 8002 (.rank | default 0) }}}
  {{- include "moonpool.probes" (dict "port" (print "health" $suffix) "startSeconds" .root.Values.startSeconds) | nindent 2 }}
  resources: {{- toYaml .resources | nindent 4 }}
  securityContext: {{- include "moonpool.containerSecurity" . | nindent 4 }}
  volumeMounts:
    {{- include "moonpool.mounts" .root | nindent 4 }}
    {{- if .root.Values.tls.clusterSecret }}
    - {name: cluster-tls, mountPath: /etc/moonpool/cluster-tls, readOnly: true}
    {{- end }}
    {{- with .mounts }}{{ toYaml . | nindent 4 }}{{ end }}
{{- end -}}

{{- /* Seconds until a pod that was told to stop is killed: its drain, and its end. */ -}}
{{- define "moonpool.graceSeconds" -}}
{{ add (int .Values.drainSeconds) 20 }}
{{- end -}}

{{- define "moonpool.pullSecrets" -}}
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end -}}
