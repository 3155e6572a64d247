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

{{- /* An image by its digest, which names one content. A tag names whatever was pushed last. */ -}}
{{- define "kvcore.pinned" -}}
{{- if .image.digest }}
{{- .image.repository }}{{ with .image.tag }}:{{ . }}{{ end }}@{{ .image.digest }}
{{- else if and .root.Values.allowTags .image.tag }}
{{- .image.repository }}:{{ .image.tag }}
{{- else }}
{{- fail (printf "given no %s.digest; supported is the digest of the image (sha256:...), or a tag with allowTags=true" .name) }}
{{- end }}
{{- end }}

{{- define "kvcore.image" -}}
image: {{ include "kvcore.pinned" (dict "name" "image" "image" .Values.image "root" .) }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
{{- end }}

{{- /* Server and engines have one user: each trusts only what belongs to its own. */ -}}
{{- define "kvcore.podSecurity" -}}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: {{ .Values.user }}
  runAsGroup: {{ .Values.user }}
  fsGroup: {{ .Values.user }}
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "kvcore.containerSecurity" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{- define "kvcore.pullSecrets" -}}
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- /* Memory of the node that server and engines share. Only root can make a folder in /run. */ -}}
{{- define "kvcore.run" -}}
/run/kvcore/{{ .Release.Namespace }}-{{ .Release.Name }}
{{- end }}

{{- /* Of engines and servers, which must agree on them: namespaces are derived from them. */ -}}
{{- define "kvcore.secretEnv" -}}
- name: KVCORE__NAMESPACE__SECRET
  valueFrom: {secretKeyRef: {name: {{ .Values.secret }}, key: namespace-secret}}
- name: KVCORE__TENANTS
  valueFrom: {secretKeyRef: {name: {{ .Values.secret }}, key: tenants, optional: true}}
{{- end }}

{{- /* Of who has the tiers: its name among others, and where Mooncake reaches it. */ -}}
{{- define "kvcore.tierEnv" -}}
- name: KVCORE__EVENTS__TOPIC
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
{{- if eq .Values.store.kind "mooncake" }}
- name: KVCORE__TIERS__SHARED__OPTIONS__HOST
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
- {name: MC_MIN_PRC_PORT, value: "15000"}
- {name: MC_MAX_PRC_PORT, value: "17000"}
{{- end }}
{{- if include "kvcore.passwordKey" . }}
- name: KVCORE__TIERS__SHARED__OPTIONS__PASSWORD_FILE
  value: /etc/kvcore-store/password
{{- end }}
{{- end }}

{{- /* The key of the secret that holds the store's password, or nothing. */ -}}
{{- define "kvcore.passwordKey" -}}
{{- if eq .Values.store.kind "valkey" }}valkey-password
{{- else if eq .Values.store.kind "url" }}{{ .Values.store.passwordKey }}{{ end }}
{{- end }}

{{- /* Of who has the tiers: what to reach the store with. */ -}}
{{- define "kvcore.passwordMount" -}}
{{- if include "kvcore.passwordKey" . }}
- {name: store-password, mountPath: /etc/kvcore-store, readOnly: true}
{{- end }}
{{- end }}

{{- define "kvcore.passwordVolume" -}}
{{- with include "kvcore.passwordKey" . }}
- name: store-password
  secret:
    secretName: {{ $.Values.secret }}
    defaultMode: 0440
    items: [{key: {{ . }}, path: password}]
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
path = "/var/cache/kvcore/blocks"
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

{{- /* Who has the tiers: the server, or each engine. */ -}}
{{- define "kvcore.owner" -}}
{{- ternary "server" "engine" .Values.server.enabled -}}
{{- end }}

{{- define "kvcore.peer" -}}
- podSelector:
    matchLabels: {{- include "kvcore.selector" . | nindent 6 }}
{{- end }}
