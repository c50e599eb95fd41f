{{/* Base of all names: the release's name, with the chart's name unless it contains that. */}}
{{- define "stepkeeper.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{ .Values.fullnameOverride }}
{{- else if contains .Chart.Name .Release.Name -}}
{{ .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else -}}
{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 40 | trimSuffix "-" }}
{{- end -}}
{{- end -}}

{{- define "stepkeeper.operator" -}}
{{ include "stepkeeper.fullname" . }}-operator
{{- end -}}

{{- define "stepkeeper.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end -}}

{{- define "stepkeeper.labels" -}}
{{ include "stepkeeper.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "stepkeeper.image" -}}
{{ .Values.image.repository }}
{{- if .Values.image.digest }}@{{ .Values.image.digest }}{{ else }}:{{ .Values.image.tag | default .Chart.AppVersion }}{{ end }}
{{- end -}}

{{/* Names of the Secrets with startup scripts, as JSON: {"namespace": ["name", …]}. */}}
{{- define "stepkeeper.startupScripts" -}}
{{- $found := dict -}}
{{- range .Values.cloudTPU.startupScriptSecrets -}}
{{- $_ := set $found .namespace (append (get $found .namespace | default list) .name | uniq) -}}
{{- end -}}
{{- toJson $found -}}
{{- end -}}
