{{/* Sizes that follow from a gang. The argument is a section of the values: prefill or decode. */}}
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
