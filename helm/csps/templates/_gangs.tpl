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
