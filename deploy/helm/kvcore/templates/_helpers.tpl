{{- define "kvcore.selector" -}}
app.kubernetes.io/name: {{ .name }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- end }}

{{- define "kvcore.podLabels" -}}
{{ include "kvcore.selector" . }}
app.kubernetes.io/part-of: kvcore
{{- end }}

{{- define "kvcore.labels" -}}
{{ include "kvcore.podLabels" . }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end }}

{{- define "kvcore.podAnnotations" -}}
checksum/settings: {{ include "kvcore.settings" .root | sha256sum }}
{{- if .root.Values.monitoring.annotations }}
prometheus.io/scrape: "true"
prometheus.io/port: {{ .port | quote }}
{{- end }}
{{- end }}

{{- define "kvcore.image" -}}
image: {{ .Values.image.repository }}:{{ .Values.image.tag }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
{{- end }}

{{- define "kvcore.pullSecrets" -}}
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- /* Memory of the node that server and engines share. */ -}}
{{- define "kvcore.run" -}}
/dev/shm/kvcore-{{ .Release.Namespace }}-{{ .Release.Name }}
{{- end }}

{{- /* Of who has the tiers: its name among others, and where Mooncake reaches it. */ -}}
{{- define "kvcore.tierEnv" -}}
- name: KVCORE__EVENTS__TOPIC
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
{{- if eq .Values.store.kind "mooncake" }}
- name: KVCORE__TIERS__SHARED__OPTIONS__HOST
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
{{- end }}
{{- end }}

{{- define "kvcore.hasPassword" -}}
{{- if and (eq .Values.store.kind "url") .Values.store.passwordKey }}true{{ end }}
{{- end }}

{{- /* Of who has the tiers: what to reach the store with. */ -}}
{{- define "kvcore.passwordMount" -}}
{{- if include "kvcore.hasPassword" . }}
- {name: store-password, mountPath: /etc/kvcore-store, readOnly: true}
{{- end }}
{{- end }}

{{- define "kvcore.passwordVolume" -}}
{{- if include "kvcore.hasPassword" . }}
- name: store-password
  secret:
    secretName: {{ .Values.secret }}
    items: [{key: {{ .Values.store.passwordKey }}, path: password}]
{{- end }}
{{- end }}

{{- define "kvcore.eventPorts" -}}
- {name: events, containerPort: 5657}
- {name: events-replay, containerPort: 5658}
{{- end }}

{{- define "kvcore.settings" -}}
{{ include "kvcore.engineSettings" . }}
{{ include "kvcore.serverSettings" . }}
{{- end }}

{{- define "kvcore.tiers" -}}
[host]
capacity = {{ .Values.host.capacity | quote }}
{{- if .Values.disk.capacity }}

[disk]
path = "/var/cache/kvcore"
capacity = {{ .Values.disk.capacity | quote }}
{{- end }}
{{- if ne .Values.store.kind "none" }}

[tiers.shared]
plugin = {{ ternary "mooncake" "redis" (eq .Values.store.kind "mooncake") | quote }}
capacity = {{ .Values.store.capacity | quote }}

[tiers.shared.options]
{{- if eq .Values.store.kind "mooncake" }}
master = "{{ .Release.Name }}-mooncake-master:50051"
lend = {{ .Values.store.mooncake.lend | quote }}
{{- else if eq .Values.store.kind "valkey" }}
url = "redis://{{ .Release.Name }}-valkey:6379/0"
{{- else }}
url = {{ .Values.store.url | quote }}
{{- if include "kvcore.hasPassword" . }}
password_file = "/etc/kvcore-store/password"
{{- end }}
{{- end }}
{{- end }}

[events]
endpoint = "tcp://*:5657"
replay_endpoint = "tcp://*:5658"
trusted_network = true # who reaches these ports is decided by the network
{{- with .Values.settings }}

{{ . | trim }}
{{- end }}
{{- end }}

{{- define "kvcore.engineSettings" -}}
{{- if .Values.server.enabled -}}
[server]
address = "local"
folder = "/run/kvcore/server"
{{- else -}}
{{ include "kvcore.tiers" . }}
{{- end }}
{{- with .Values.engine.settings }}

{{ . | trim }}
{{- end }}

[log]
format = "json"
{{- end }}

{{- define "kvcore.serverSettings" -}}
{{- if .Values.server.enabled -}}
[server]
address = "local"
folder = "/run/kvcore/server"
metrics = "0.0.0.0:9464"

{{ include "kvcore.tiers" . }}

[log]
format = "json"
{{- end }}
{{- end }}

{{- /* Mooncake's clients read each other's memory at ports that they choose themselves. */ -}}
{{- define "kvcore.amongLenders" -}}
- from:
    - podSelector:
        matchLabels: {{- include "kvcore.selector" . | nindent 10 }}
    - podSelector:
        matchLabels: {{- include "kvcore.selector" (dict "name" "mooncake-master" "root" .root) | nindent 10 }}
{{- end }}
