{{/* Where the checkpoint comes from: at most one of three kinds of volume. */}}
{{- define "csps.hasModelVolume" -}}
{{- $volume := .Values.model.volume -}}
{{- $chosen := compact (list $volume.existingClaim $volume.hostPath (ternary "create" "" $volume.create.enabled)) -}}
{{- if gt (len $chosen) 1 -}}
{{- fail "model.volume: set at most one of existingClaim, hostPath and create.enabled" -}}
{{- end -}}
{{- eq (len $chosen) 1 -}}
{{- end }}

{{- define "csps.modelClaim" -}}
{{- $volume := .Values.model.volume -}}
{{- default (ternary (printf "%s-model" (include "csps.fullname" .)) "" $volume.create.enabled) $volume.existingClaim -}}
{{- end }}

{{/* Items of lists: the model's, then those of the values. Nothing at all where there is none. */}}
{{- define "csps.volumes" }}
{{- if eq (include "csps.hasModelVolume" .) "true" }}
- name: model
  {{- with include "csps.modelClaim" . }}
  persistentVolumeClaim:
    claimName: {{ . }}
    readOnly: true
  {{- else }}
  hostPath:
    path: {{ .Values.model.volume.hostPath | quote }}
    type: Directory
  {{- end }}
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
{{- with .Values.pods.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end }}
