{{/* What Ray Serve deploys: `serve deploy` takes the same document. Read by the operator from the
RayService and stored in clear, so no secret may ever get in here. */}}
{{- define "csps.serveConfig" -}}
proxy_location: EveryNode
http_options:
  host: 0.0.0.0
  port: 8000
logging_config:
  log_level: INFO
  enable_access_log: false
applications:
  - name: csps
    route_prefix: /
    import_path: csps.services.app:build
    args:
      {{- include "csps.settings" . | nindent 6 }}
    deployments:
      {{- range tuple "Router" "Configurator" "Registry" }}
      - name: {{ . }}
        ray_actor_options:
          num_cpus: 0.05
          resources: {csps_control: 0.1}
          {{- if eq . "Router" }}
          runtime_env: # these options replace those of the code, this one included
            env_vars: {RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD: "0"}
          {{- end }}
      {{- end }}
      {{- range $role := splitList " " (include "csps.roles" .) }}
      - name: {{ title $role }}Gang
        {{- include "csps.rankPlacement" (tuple $role (index $.Values $role)) | nindent 8 }}
      {{- end }}
{{- end }}

{{/* A rank takes one unit of a resource that only the pods of its role have. By CPUs alone, small
decode ranks could fill pods meant for prefill, and the prefill gang would wait forever. */}}
{{- define "csps.rankPlacement" -}}
{{- $role := index . 0 -}}
{{- $gang := index . 1 -}}
ray_actor_options:
  num_cpus: {{ $gang.threads }}
  num_gpus: {{ $gang.gpusPerRank }}
  resources: {csps_{{ $role }}: 1}
{{- end }}

{{/* The application's arguments; what the chart derives wins over `extraSettings`, because pods are
sized by it. */}}
{{- define "csps.settings" -}}
{{- $derived := include "csps.derivedSettings" . | fromYaml -}}
{{- toYaml (mergeOverwrite (deepCopy .Values.extraSettings) $derived) -}}
{{- end }}

{{- define "csps.derivedSettings" -}}
model: {{ include "csps.modelSetting" . | quote }}
{{- with include "csps.servedName" . }}
served_model_name: {{ . | quote }}
{{- end }}
dtype: {{ .Values.model.dtype }}
device: {{ .Values.model.device }}
{{- with .Values.model.maxPositions }}
max_positions: {{ int . }}
{{- end }}
{{- if .Values.auth.requireApiKey }}
api_keys_file: {{ include "csps.keyFile" . }}
{{- end }}
drain_s: {{ .Values.drainSeconds }}
{{- range $role := splitList " " (include "csps.roles" .) }}
{{ $role }}:
  {{- include "csps.gangSettings" (index $.Values $role) | nindent 2 }}
{{- end }}
scheduling:
  {{- toYaml .Values.scheduling | nindent 2 }}
queue:
  max_waiting: {{ int .Values.queue.maxWaiting }}
  max_waiting_tokens: {{ int .Values.queue.maxWaitingTokens }}
  max_attempts: {{ int .Values.queue.maxAttempts }}
topology:
  prefill: {{ toJson .Values.topology.prefill }}
  decode: {{ toJson .Values.topology.decode }}
  elastic: {{ toJson .Values.topology.elastic }}
  link_ratio: {{ float64 .Values.topology.linkRatio }}
telemetry:
  {{- include "csps.telemetrySettings" .Values.telemetry | nindent 2 }}
{{- end }}

{{- define "csps.gangSettings" -}}
instances: {{ int .instances }}
tp: {{ int .tp }}
threads: {{ int .threads }}
kv_slots: {{ if kindIs "string" .kvSlots }}auto{{ else }}{{ int .kvSlots }}{{ end }}
num_cpus: {{ int .threads }}
num_gpus: {{ int .gpusPerRank }}
{{- end }}

{{/* Without an endpoint the application would write span files, which nobody empties in a pod. */}}
{{- define "csps.telemetrySettings" -}}
enabled: {{ ne .otlpEndpoint "" }}
{{- with .otlpEndpoint }}
otlp_endpoint: {{ . | quote }}
{{- end }}
spans_dir: /tmp/csps-traces
sample: {{ .sample }}
timeline_sample: {{ .timelineSample }}
project: {{ .project | quote }}
metrics_prefix: {{ .metricsPrefix }}
{{- end }}
