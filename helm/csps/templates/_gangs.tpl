{{/* The gangs of the cell, by what they do: an elastic one, or a pair. */}}
{{- define "csps.roles" -}}
{{- if .Values.elastic.instances -}}elastic{{- else -}}prefill decode{{- end -}}
{{- end }}

{{/* All pods: the head's, and those of the gangs. */}}
{{- define "csps.pods" -}}
{{- $pods := 1 -}}
{{- range $role := splitList " " (include "csps.roles" .) -}}
{{- $pods = add $pods (include "csps.podsOfGang" (index $.Values $role)) -}}
{{- end -}}
{{- $pods -}}
{{- end }}

{{/* Sizes that follow from a gang. The argument is a section of the values. */}}
{{- define "csps.ranks" -}}
{{- mul .instances .tp -}}
{{- end }}

{{- define "csps.ranksPerPod" -}}
{{- default (include "csps.ranks" .) .ranksPerPod | int -}}
{{- end }}

{{/* Pods are alike, so a gang has to fill them: a spare place would be paid for and never used. */}}
{{- define "csps.podsOfGang" -}}
{{- $ranks := include "csps.ranks" . | int -}}
{{- $each := include "csps.ranksPerPod" . | int -}}
{{- if mod $ranks $each -}}
{{- fail (printf "a gang of %d ranks (instances x tp) does not fill pods of %d: choose ranksPerPod so that it divides" $ranks $each) -}}
{{- end -}}
{{- div $ranks $each -}}
{{- end }}

{{/* The application refuses an instance whose ranks are on two servers. */}}
{{- define "csps.requireWholeInstances" -}}
{{- $each := include "csps.ranksPerPod" . | int -}}
{{- if mod $each .tp -}}
{{- fail (printf "pods of %d ranks cut instances of %d (tp) in two, which podsAreServers does not allow: choose ranksPerPod as a multiple of tp" $each (int .tp)) -}}
{{- end -}}
{{- end }}
