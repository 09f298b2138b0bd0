{{/* The worker groups of a gang: one of alike pods, or, where each pod is a server of its own to
the application, one for each pod, because KubeRay labels the Ray nodes of a group alike. */}}
{{- define "csps.workerGroups" -}}
{{- $root := index . 0 -}}
{{- $role := index . 1 -}}
{{- $gang := index . 2 -}}
{{- $pods := include "csps.podsOfGang" $gang | int -}}
{{- $common := dict "root" $root "role" $role "gang" $gang -}}
{{- if $root.Values.topology.podsAreServers -}}
{{- include "csps.requireWholeInstances" $gang -}}
{{- range $pod := until $pods }}
{{- $labels := dict "csps.io/server" (printf "0-%d" $pod) }}
{{- include "csps.workerGroup" (merge (dict "name" (printf "%s-%d" $role $pod) "pods" 1 "labels" $labels) $common) }}
{{- end }}
{{- else -}}
{{- include "csps.workerGroup" (merge (dict "name" $role "pods" $pods "labels" dict) $common) }}
{{- end }}
{{- end }}

{{/* The group's size is fixed: with a pod less, no rank can start. */}}
{{- define "csps.workerGroup" -}}
{{- $root := .root -}}
{{- $role := .role -}}
{{- $gang := .gang -}}
{{- $ranks := include "csps.ranksPerPod" $gang | int }}
- groupName: {{ .name }}
  replicas: {{ .pods }}
  minReplicas: {{ .pods }}
  maxReplicas: {{ .pods }}
  {{- with .labels }}
  labels:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  rayStartParams:
    num-cpus: {{ mul $ranks $gang.threads | quote }}
    num-gpus: {{ mul $ranks $gang.gpusPerRank | quote }}
    object-store-memory: "134217728"
    resources: {{ include "csps.rayResource" (tuple (printf "csps_%s" $role) $ranks) }}
  template:
    metadata:
      {{- include "csps.podMetadata" (tuple $root $role) | nindent 6 }}
    spec:
      {{- include "csps.podSpec" (tuple $root $gang) | nindent 6 }}
      containers:
        - name: ray-worker
          {{- include "csps.container" $root | nindent 10 }}
          ports:
            - {name: metrics, containerPort: 8080}
            - {name: serve, containerPort: 8000}
          env:
            {{- include "csps.env" $root | nindent 12 }}
          resources:
            {{- include "csps.workerResources" (tuple $root $gang) | nindent 12 }}
          {{- include "csps.probes" (tuple $root (dict "path" "/-/healthz" "port" "serve")) | nindent 10 }}
{{- end }}

{{/* KubeRay puts the value into a shell command as it is, hence quotes inside of quotes. */}}
{{- define "csps.rayResource" -}}
{{- printf "'{\"%s\": %d}'" (index . 0) (index . 1) | quote -}}
{{- end }}
