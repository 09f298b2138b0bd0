{{/* Pod templates of the Ray cluster. KubeRay completes the container: `ray start`, the token,
/dev/shm. It takes the first container for Ray's. */}}
{{- define "csps.podMetadata" -}}
{{- $root := index . 0 -}}
labels:
  {{- with $root.Values.pods.labels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  {{- include "csps.selectorLabels" $root | nindent 2 }}
  app.kubernetes.io/component: {{ index . 1 }}
{{- with $root.Values.pods.annotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "csps.podSpec" -}}
{{- $root := index . 0 -}}
{{- $section := index . 1 -}}
automountServiceAccountToken: false
# Requests may run for drainSeconds after the signal, then replicas close.
terminationGracePeriodSeconds: {{ add $root.Values.drainSeconds 30 }}
{{- with $root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- range $key := tuple "priorityClassName" "runtimeClassName" "serviceAccountName" }}
{{- with index $root.Values.pods $key }}
{{ $key }}: {{ . | quote }}
{{- end }}
{{- end }}
securityContext:
  {{- toYaml $root.Values.pods.podSecurityContext | nindent 2 }}
{{- range $key := tuple "nodeSelector" "tolerations" "affinity" }}
{{- with index $section $key }}
{{ $key }}:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- $volumes := include "csps.volumes" $root | trim -}}
{{- if eq (len .) 3 }}
{{- $volumes = printf "%s\n%s" $volumes (include (index . 2) $root) | trim -}}
{{- end }}
{{- with $volumes }}
volumes:
  {{- . | nindent 2 }}
{{- end }}
{{- with include "csps.initContainers" $root | trim }}
initContainers:
  {{- . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "csps.image.fields" -}}
image: {{ include "csps.image" . | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext:
  {{- toYaml .Values.pods.securityContext | nindent 2 }}
{{- end }}

{{- define "csps.container" -}}
{{- include "csps.image.fields" . }}
{{- with include "csps.volumeMounts" . | trim }}
volumeMounts:
  {{- . | nindent 2 }}
{{- end }}
{{- end }}

{{/* Only the router reads API keys, and it runs on the head. A file, because a pod's environment
keeps revoked keys until the pod ends. */}}
{{- define "csps.keyVolume" -}}
{{- if .Values.auth.requireApiKey }}
- name: api-keys
  secret:
    secretName: {{ include "csps.secretName" . }}
    items: [{key: api-keys, path: api-keys}]
{{- end }}
{{- end }}

{{- define "csps.headContainer" -}}
{{- include "csps.container" . }}
{{- if .Values.auth.requireApiKey }}
{{- if not (include "csps.volumeMounts" . | trim) }}
volumeMounts:
{{- end }}
  - name: api-keys
    mountPath: {{ include "csps.keyFile" . | dir }}
    readOnly: true
{{- end }}
{{- end }}

{{- define "csps.keyFile" -}}
/etc/csps/keys/api-keys
{{- end }}

{{/* The application is built on any node and needs the cluster secret there. RAY_AUTH_MODE is what
KubeRay sets as well; an operator too old to know authOptions must not leave Ray's ports open. */}}
{{- define "csps.env" -}}
- name: CSPS_CLUSTER_SECRET
  valueFrom:
    secretKeyRef:
      name: {{ include "csps.secretName" . }}
      key: cluster-secret
- name: RAY_AUTH_MODE
  value: token
- name: RAY_USAGE_STATS_ENABLED
  value: "0"
- name: RAY_SERVE_PROXY_USE_GRPC # a third less CPU for every streamed token
  value: "1"
- name: RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH # half-sent headers do not keep a connection
  value: csps.services.http.header_deadline:install
- name: RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S # a dead proxy is replaced in seconds
  value: "0.5"
- name: RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S # and a frozen one
  value: "2.5"
- name: RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS # a frozen router cannot drain
  value: "1"
- name: RAY_kill_worker_timeout_milliseconds # a frozen rank holds its GPU
  value: "500"
- name: RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH
  value: "2147483647"
- name: HOME # the user has no entry in /etc/passwd
  value: /tmp
- name: USER
  value: csps
{{- if .Values.haproxy.enabled }}
- name: RAY_SERVE_ENABLE_HA_PROXY # a fraction of what Serve's own proxy takes for a token
  value: "1"
- name: RAY_SERVE_HAPROXY_BINARY_PATH # written by the init container
  value: /run/csps/haproxy
- name: RAY_SERVE_HAPROXY_CONFIG_FILE_LOC
  value: /run/csps/haproxy.cfg
- name: RAY_SERVE_HAPROXY_SOCKET_PATH
  value: /run/csps/admin.sock
- name: RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH
  value: /run/csps/metrics.sock
- name: RAY_SERVE_HAPROXY_SERVER_STATE_BASE
  value: /run/csps
- name: RAY_SERVE_HAPROXY_SERVER_STATE_FILE
  value: /run/csps/server-state
- name: RAY_SERVE_HAPROXY_STATS_PORT # on loopback, like the next
  value: "8404"
- name: RAY_SERVE_HAPROXY_METRICS_PORT
  value: "9101"
- name: RAY_SERVE_FALLBACK_PROXY_HTTP_PORT
  value: "8500"
- name: RAY_SERVE_HAPROXY_NBTHREAD
  value: "1"
- name: RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S # a client that stalls
  value: "30"
- name: RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S # the longest stream across an update
  value: "3600"
- name: RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S
  value: "1.0"
{{- end }}
{{- if .Values.model.download.enabled }}
- name: HF_HUB_CACHE
  value: {{ include "csps.hubCache" . | quote }}
- name: HF_HUB_OFFLINE # the init container has downloaded; the mount is read only
  value: "1"
{{- end }}
{{- with .Values.pods.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* The raylet's health keeps a pod alive. A worker takes traffic when its HTTP proxy does; on the
head the operator watches the proxy itself, and workers must find the head before there is one. */}}
{{- define "csps.probes" -}}
{{- $root := index . 0 -}}
livenessProbe:
  httpGet: {path: /api/healthz, port: 52365}
  initialDelaySeconds: 30
  {{- include "csps.probeTiming" $root | nindent 2 }}
  failureThreshold: {{ $root.Values.probes.livenessFailureThreshold }}
readinessProbe:
  httpGet: {{ toJson (index . 1) }}
  initialDelaySeconds: 10
  {{- include "csps.probeTiming" $root | nindent 2 }}
  failureThreshold: {{ $root.Values.probes.readinessFailureThreshold }}
{{- end }}

{{- define "csps.probeTiming" -}}
periodSeconds: {{ .Values.probes.periodSeconds }}
timeoutSeconds: {{ .Values.probes.timeoutSeconds }}
{{- end }}

{{/* Memory is a limit as well: a pod that outgrows it must not take its neighbours along. CPUs have
none, because throttled ranks hold up their whole gang. */}}
{{- define "csps.workerResources" -}}
{{- $values := (index . 0).Values -}}
{{- $gang := index . 1 -}}
{{- $ranks := include "csps.ranksPerPod" $gang | int -}}
{{- $memory := printf "%dMi" (add (mul $ranks $gang.memoryMiBPerRank) $values.workerOverhead.memoryMiB) -}}
{{- $gpus := mul $ranks $gang.gpusPerRank -}}
requests:
  cpu: {{ printf "%dm" (add (mul $ranks $gang.threads 1000) $values.workerOverhead.cpuMillicores) }}
  memory: {{ $memory }}
limits:
  memory: {{ $memory }}
  {{- if $gpus }}
  {{ $values.gpuResourceName }}: {{ $gpus | quote }}
  {{- end }}
{{- end }}
