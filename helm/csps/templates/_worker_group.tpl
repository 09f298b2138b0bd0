{{/* One group of alike pods per gang. Its size is the gang's: with a pod less, no rank can start. */}}
{{- define "csps.workerGroup" -}}
{{- $root := index . 0 -}}
{{- $role := index . 1 -}}
{{- $gang := index . 2 -}}
{{- $ranks := include "csps.ranksPerPod" $gang | int -}}
{{- $pods := include "csps.podsOfGang" $gang -}}
- groupName: {{ $role }}
  replicas: {{ $pods }}
  minReplicas: {{ $pods }}
  maxReplicas: {{ $pods }}
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
