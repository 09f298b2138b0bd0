{{/* Where the checkpoint comes from: at most one of three kinds of volume. A download without one
goes to each pod's own disk. */}}
{{- define "csps.hasModelVolume" -}}
{{- $volume := .Values.model.volume -}}
{{- $chosen := compact (list $volume.existingClaim $volume.hostPath (ternary "create" "" $volume.create.enabled)) -}}
{{- if gt (len $chosen) 1 -}}
{{- fail "model.volume: set at most one of existingClaim, hostPath and create.enabled" -}}
{{- end -}}
{{- if and .Values.model.download.enabled (not (regexMatch "^[A-Za-z0-9][A-Za-z0-9_.-]*/[A-Za-z0-9][A-Za-z0-9_.-]*$" .Values.model.path)) -}}
{{- fail (printf "model.download: model.path must be an id of the Hugging Face Hub, such as Qwen/Qwen3-8B, and is %s" .Values.model.path) -}}
{{- end -}}
{{- or (eq (len $chosen) 1) .Values.model.download.enabled -}}
{{- end }}

{{- define "csps.modelClaim" -}}
{{- $volume := .Values.model.volume -}}
{{- default (ternary (printf "%s-model" (include "csps.fullname" .)) "" $volume.create.enabled) $volume.existingClaim -}}
{{- end }}

{{/* The model's name in the settings: a commit of the Hub by its folder in the cache, because an id
alone means the newest that was downloaded. */}}
{{- define "csps.modelSetting" -}}
{{- $download := .Values.model.download -}}
{{- if and $download.enabled $download.revision -}}
{{- printf "%s/models--%s/snapshots/%s" (include "csps.hubCache" .) (replace "/" "--" .Values.model.path) $download.revision -}}
{{- else -}}
{{- .Values.model.path -}}
{{- end -}}
{{- end }}

{{- define "csps.servedName" -}}
{{- default (ternary .Values.model.path "" .Values.model.download.enabled) .Values.model.servedName -}}
{{- end }}

{{- define "csps.hubCache" -}}
{{- printf "%s/hub" (trimSuffix "/" .Values.model.volume.mountPath) -}}
{{- end }}

{{/* Items of lists: the model's, HAProxy's, then those of the values. Nothing at all where there is
none. */}}
{{- define "csps.volumes" }}
{{- if eq (include "csps.hasModelVolume" .) "true" }}
- name: model
  {{- if include "csps.modelClaim" . }}
  persistentVolumeClaim:
    claimName: {{ include "csps.modelClaim" . }}
    {{- if not .Values.model.download.enabled }}
    readOnly: true
    {{- end }}
  {{- else if .Values.model.volume.hostPath }}
  hostPath:
    path: {{ .Values.model.volume.hostPath | quote }}
    type: Directory
  {{- else }}
  emptyDir: {}
  {{- end }}
{{- end }}
{{- if .Values.haproxy.enabled }}
- name: haproxy
  emptyDir: {}
{{- end }}
{{- with .Values.pods.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "csps.volumeMounts" }}
{{- if eq (include "csps.hasModelVolume" .) "true" }}
- name: model
  mountPath: {{ .Values.model.volume.mountPath | quote }}
  readOnly: true
{{- end }}
{{- if .Values.haproxy.enabled }}
- name: haproxy
  mountPath: /run/csps
{{- end }}
{{- with .Values.pods.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* What runs before Ray in every pod: the download, which files of the Hub's cache on a shared
volume lock against that of other pods, and the program that starts HAProxy. */}}
{{- define "csps.initContainers" }}
{{- if .Values.model.download.enabled }}
- name: download-model
  {{- include "csps.image.fields" . | nindent 2 }}
  command: [python, -c]
  args:
    - |
      import sys
      from csps.services.settings.hub import download_model
      print(download_model(sys.argv[1], revision=sys.argv[2] or None))
    - {{ .Values.model.path | quote }}
    - {{ .Values.model.download.revision | quote }}
  env:
    - {name: HF_HUB_CACHE, value: {{ include "csps.hubCache" . | quote }}}
    - {name: HOME, value: /tmp}
    {{- with .Values.model.download.endpoint }}
    - {name: HF_ENDPOINT, value: {{ . | quote }}}
    {{- end }}
    {{- with .Values.model.download.tokenSecret }}
    - name: HF_TOKEN
      valueFrom:
        secretKeyRef:
          name: {{ . }}
          key: token
    {{- end }}
  resources:
    requests: {cpu: 100m, memory: 1Gi}
    limits: {memory: 2Gi}
  volumeMounts:
    - {name: model, mountPath: {{ .Values.model.volume.mountPath | quote }}}
{{- end }}
{{- if .Values.haproxy.enabled }}
- name: haproxy
  {{- include "csps.image.fields" . | nindent 2 }}
  command: [python, -m, csps.services.launch.reverse_proxy, /run/csps]
  resources:
    requests: {cpu: 100m, memory: 128Mi}
    limits: {memory: 512Mi}
  volumeMounts:
    - {name: haproxy, mountPath: /run/csps}
{{- end }}
{{- with .Values.pods.extraInitContainers }}
{{ toYaml . }}
{{- end }}
{{- end }}
