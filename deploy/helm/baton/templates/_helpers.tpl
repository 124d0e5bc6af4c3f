{{/* A release called `baton` makes objects called baton-prefill, baton-decode: the names in deploy/keda. */}}
{{- define "baton.fullname" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 50 | trimSuffix "-" }}
{{- else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 50 | trimSuffix "-" }}{{ end }}
{{- end }}

{{/* What finds the pods of a role. Never changes over a release's life. Takes (dict "root" $ "role" "decode"). */}}
{{- define "baton.selector" -}}
app.kubernetes.io/name: {{ .root.Chart.Name }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .role }}
{{- end }}

{{- define "baton.labels" -}}
{{ include "baton.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end }}

{{/* Both kinds of node, without the coordinators. */}}
{{- define "baton.nodeSelector" -}}
matchLabels:
  app.kubernetes.io/name: {{ .Chart.Name }}
  app.kubernetes.io/instance: {{ .Release.Name }}
matchExpressions:
  - { key: app.kubernetes.io/component, operator: In, values: [prefill, decode] }
{{- end }}

{{- define "baton.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}{{ with .Values.image.digest }}@{{ . }}{{ end }}
{{- end }}

{{- define "baton.anyAddress" -}}
{{ ternary "[::]" "0.0.0.0" .Values.network.ipv6 }}
{{- end }}

{{/* The pod's own address, from the variable POD_IP. */}}
{{- define "baton.podAddress" -}}
{{ ternary "[$(POD_IP)]" "$(POD_IP)" .Values.network.ipv6 }}
{{- end }}

{{/* The port table of deploy/README.md. */}}
{{- define "baton.port" -}}
{{- get (dict "coordinator" "8000" "control" "7400" "prefill" "7410" "decode" "7420") . }}
{{- end }}

{{/*
etcd's address as baton reads it. Kubernetes puts the user and the password in, so that they stand in no ConfigMap and in no
manifest.
*/}}
{{- define "baton.etcd" -}}
{{- with .Values.etcd -}}
{{- ternary "etcds" "etcd" (ne .tls.secretName "") -}}
://{{ if .auth.secretName }}$(ETCD_USERNAME):$(ETCD_PASSWORD)@{{ end }}{{ join "," .endpoints }}/{{ .cluster }}
{{- $files := "" -}}
{{- if .tls.secretName }}{{ $files = "&ca=/etc/baton/etcd-tls/ca.crt" }}{{ end -}}
{{- if and .tls.secretName .tls.clientCertificate -}}
{{- $files = printf "%s&cert=/etc/baton/etcd-tls/tls.crt&key=/etc/baton/etcd-tls/tls.key" $files }}{{ end -}}
?lease_s={{ .leaseSeconds }}{{ $files }}
{{- end -}}
{{- end }}

{{/* JSON's strings, numbers, booleans and lists are TOML's, too. A null takes a default of the chart back. */}}
{{- define "baton.toml" -}}
{{- range $key, $value := . }}
{{- if not (kindIs "invalid" $value) }}
{{ $key }} = {{ toJson $value }}
{{- end }}
{{- end }}
{{- end }}

{{/* Where a pool computes. The device plugin shows a pod its own GPU alone, as the first. Empty: the program's default. */}}
{{- define "baton.device" -}}
{{- $values := index .root.Values .role -}}
{{- if hasKey $values.config "device" }}{{ $values.config.device | default "" }}
{{- else if and $values.gpu $values.gpu.count }}cuda:0{{ end }}
{{- end }}

{{/* Not empty where a pool's KV may take a transport. Takes (dict "root" $ "role" "decode" "transport" "nccl"). */}}
{{- define "baton.uses" -}}
{{- $values := index .root.Values .role -}}
{{- if and $values.enabled (has .transport (splitList "," (join "," ($values.config.transports | default list)))) }}yes{{ end }}
{{- end }}

{{/*
NCCL's listeners, where a pool (dict "root" $ "role" "prefill") uses NCCL. Two ranks connect to each other, in both directions. A pod that
changed its role keeps its label, so its pair may be a pod of its own pool.
*/}}
{{- define "baton.ncclRule" -}}
{{- if include "baton.uses" (dict "root" .root "role" .role "transport" "nccl") -}}
{{- with .root.Values.gpuTransports.nccl.ports -}}
- ports: [{ port: {{ .first }}, endPort: {{ .last }} }]
  from:
    - podSelector: {{- include "baton.nodeSelector" $.root | nindent 8 }}
{{- end }}
{{- end }}
{{- end }}

{{- define "baton.config" -}}
{{- $values := index .root.Values .role -}}
{{- $own := dict
  "model" (.root.Values.model.pull | default .root.Values.model.path)
  "served_model_name" .root.Values.model.servedName
  "listen" (printf "%s:%s" (include "baton.anyAddress" .root) (include "baton.port" .role))
  "drain_ms_max" (mul $values.drainSeconds 1000)
  "allowed_hosts" (fromJsonArray (include "baton.allowedHosts" .))
-}}
{{- if eq .role "coordinator" -}}
{{- $_ := set $own "control_listen" (printf "%s:%s" (include "baton.anyAddress" .root) (include "baton.port" "control")) -}}
{{- if $values.tls.secretName -}}
{{- $_ := merge $own (dict "api_tls_cert" "/etc/baton/api-tls/tls.crt" "api_tls_key" "/etc/baton/api-tls/tls.key") -}}
{{- end -}}
{{- if $values.keys.secretName }}{{ $_ := set $own "api_keys" "/etc/baton/keys/keys.toml" }}{{ end -}}
{{- end -}}
{{- with include "baton.device" . }}{{ $_ := set $own "device" . }}{{ end -}}
{{- if .root.Values.tls.issuer -}}
{{- $_ := merge $own (dict "tls_cert" "/etc/baton/tls/tls.crt" "tls_key" "/etc/baton/tls/tls.key" "tls_ca" "/etc/baton/tls/ca.crt") -}}
{{- end -}}
{{- if eq (include "baton.plainText" .root) "yes" }}{{ $_ := set $own "insecure" true }}{{ end -}}
{{- include "baton.toml" (merge $own $values.config) | trim -}}
{{- end }}

{{/* Whether the pods talk to each other, or to etcd, without TLS. */}}
{{- define "baton.plainText" -}}
{{- $etcd := and .Values.etcd.endpoints (not .Values.etcd.tls.secretName) -}}
{{- if or (not .Values.tls.issuer) $etcd }}yes{{ end -}}
{{- end }}

{{/* What others may call a role by: its Service's names, those of a node's pods, and what the values add. */}}
{{- define "baton.allowedHosts" -}}
{{- $values := index .root.Values .role -}}
{{- $service := include "baton.fullname" .root -}}
{{- if ne .role "coordinator" }}{{ $service = printf "*.%s-%s" $service .role }}{{ end -}}
{{- $namespaced := printf "%s.%s" $service .root.Release.Namespace -}}
{{- $own := list $service $namespaced (printf "%s.svc" $namespaced) (printf "%s.svc.cluster.local" $namespaced) -}}
{{- toJson (concat $own (get $values.config "allowed_hosts" | default list)) -}}
{{- end }}

{{/* What is wrong in the values and cannot be said in the schema. */}}
{{- define "baton.validate" -}}
{{- if and (empty .Values.etcd.endpoints) (gt (int .Values.coordinator.replicas) 1) }}
{{- fail "coordinator.replicas > 1 needs etcd: nodes find all coordinators through it. Set etcd.endpoints, or coordinator.replicas=1." }}
{{- end }}
{{- if and .Values.etcd.tls.clientCertificate (not .Values.etcd.tls.secretName) }}
{{- fail "etcd.tls.clientCertificate needs etcd.tls.secretName, the Secret with ca.crt, tls.crt and tls.key." }}
{{- end }}
{{- if and .Values.coordinator.keys.secretName (not .Values.coordinator.keys.operatorSecretName) }}
{{- fail "coordinator.keys.secretName needs coordinator.keys.operatorSecretName: Prometheus and `helm test` are asked for a key as well." }}
{{- end }}
{{- if and (not .Values.prefill.enabled) (not (get .Values.decode.config "co_located")) }}
{{- fail "without prefill nodes the decode nodes must do both phases: set decode.config.co_located=true, or prefill.enabled=true." }}
{{- end }}
{{- if and .Values.compare.enabled (lt (len .Values.compare.arms) 2) }}
{{- fail "compare.enabled needs two clusters: set compare.arms to their names and addresses." }}
{{- end }}
{{- if and .Values.compare.enabled (empty .Values.compare.facts) }}
{{- fail "compare.enabled needs compare.facts: cores, GPUs and memory of each arm, as TOML." }}
{{- end }}
{{- include "baton.validateGpus" . }}
{{- end }}

{{- define "baton.validateGpus" -}}
{{- $ipc := .Values.gpuTransports.cudaIpc }}
{{- $ports := .Values.gpuTransports.nccl.ports }}
{{- range $transport := list "nccl" "cuda-ipc" }}
{{- $users := list }}
{{- range $role := list "prefill" "decode" }}
{{- $pool := dict "root" $ "role" $role "transport" $transport }}
{{- if include "baton.uses" $pool }}
{{- $users = append $users $role }}
{{- if not (hasPrefix "cuda:" (include "baton.device" $pool)) }}
{{- fail (printf "%[1]s.config.transports names %[2]s, which needs a GPU: set %[1]s.gpu.count=1, or %[1]s.config.device=cuda:N." $role $transport) }}
{{- end }}
{{- if and (eq $transport "cuda-ipc") (index $.Values $role).gpu.count }}
{{- fail (printf "cuda-ipc needs pods that see each other's GPU; %[1]s.gpu.count=1 shows a pod its own alone: set 0, and %[1]s.config.device=cuda:N." $role) }}
{{- end }}
{{- end }}
{{- end }}
{{- if and $.Values.prefill.enabled (eq (len $users) 1) }}
{{- fail (printf "only %s.config.transports names %s: both nodes of a pair need it." (first $users) $transport) }}
{{- end }}
{{- if and (eq $transport "cuda-ipc") (ne $ipc.hostNamespaces (gt (len $users) 0)) }}
{{- fail "cuda-ipc in transports and gpuTransports.cudaIpc.hostNamespaces=true need each other: set both, or neither." }}
{{- end }}
{{- end }}
{{- if and $ipc.hostNamespaces (not $ipc.secretName) }}
{{- fail "cuda-ipc needs gpuTransports.cudaIpc.secretName, a Secret with the key `secret`." }}
{{- end }}
{{- if and $ipc.hostNamespaces .Values.networkPolicy.enabled }}
{{- fail "hostNamespaces=true needs networkPolicy.enabled=false, because policies know no pod in its host's network: use the hosts' firewall." }}
{{- end }}
{{- if lt (sub $ports.last $ports.first) 99 }}
{{- fail "gpuTransports.nccl.ports needs 100 ports or more: every connection that such a pod opens takes one of them." }}
{{- end }}
{{- end }}

{{/* The pod of any role. Takes (dict "root" $ "role" "decode" "verb" "serve-decode"). */}}
{{- define "baton.podTemplate" -}}
{{- $root := .root -}}
{{- $values := index $root.Values .role -}}
{{- $isNode := ne .role "coordinator" -}}
{{- $port := include "baton.port" .role -}}
{{- $hasEtcd := not (empty $root.Values.etcd.endpoints) -}}
{{- $onGpu := and $isNode (hasPrefix "cuda:" (include "baton.device" .)) -}}
{{- $byNccl := include "baton.uses" (dict "root" $root "role" .role "transport" "nccl") -}}
{{- $byIpc := include "baton.uses" (dict "root" $root "role" .role "transport" "cuda-ipc") -}}
{{- $nccl := $root.Values.gpuTransports.nccl -}}
{{- $ownNames := list -}}
{{- range $values.env }}{{ $ownNames = append $ownNames .name }}{{ end -}}
metadata:
  labels: {{- include "baton.labels" . | nindent 4 }}
  annotations:
    # Another configuration is another pod: processes read theirs once.
    checksum/config: {{ include "baton.config" . | sha256sum }}
    {{- with $values.podAnnotations }}{{ toYaml . | nindent 4 }}{{ end }}
spec:
  {{- with $root.Values.imagePullSecrets }}
  imagePullSecrets: {{- toYaml . | nindent 4 }}
  {{- end }}
  # baton never asks Kubernetes for anything.
  automountServiceAccountToken: false
  enableServiceLinks: false
  {{- if $byIpc }}
  # What this gives up stands in values.yaml, at gpuTransports.cudaIpc. Names of Services are still found.
  hostPID: true
  hostIPC: true
  hostNetwork: true
  dnsPolicy: ClusterFirstWithHostNet
  {{- end }}
  {{- $context := deepCopy $root.Values.podSecurityContext }}
  {{- if and $byNccl (not $byIpc) }}
  {{- $range := dict "name" "net.ipv4.ip_local_port_range" "value" (printf "%d %d" (int $nccl.ports.first) (int $nccl.ports.last)) }}
  {{- $_ := set $context "sysctls" (append ($context.sysctls | default list) $range) }}
  {{- end }}
  securityContext: {{- toYaml $context | nindent 4 }}
  # The wait before the drain, the drain, and 10 s to say goodbye and close.
  terminationGracePeriodSeconds: {{ add $values.preStopSeconds $values.drainSeconds 10 }}
  {{- with $values.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- if and $isNode $values.gpu.runtimeClassName }}
  runtimeClassName: {{ $values.gpu.runtimeClassName }}
  {{- end }}
  {{- with $root.Values.model.pull }}
  initContainers:
    # Fetches the model where the volume does not have it, and checks it. Its log says what was wrong.
    - name: model
      image: {{ include "baton.image" $root }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      args: [model, pull, {{ . | quote }}]
      env: {{- toYaml $values.env | nindent 8 }}
      # The larger of an init container and the container counts, so this costs nothing.
      resources:
        requests: { cpu: 100m, memory: 128Mi }
        limits: { memory: 512Mi }
      securityContext:
        allowPrivilegeEscalation: false
        readOnlyRootFilesystem: true
        capabilities: { drop: [ALL] }
      volumeMounts:
        - { name: models, mountPath: /models }
  {{- end }}
  {{- with $values.spread }}
  topologySpreadConstraints:
    - maxSkew: 1
      topologyKey: kubernetes.io/hostname
      whenUnsatisfiable: {{ . }}
      labelSelector:
        matchLabels: {{- include "baton.selector" $ | nindent 10 }}
  {{- end }}
  containers:
    - name: {{ .role }}
      image: {{ include "baton.image" $root }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      args: [{{ .verb }}, --config, /etc/baton/{{ .role }}.toml]
      env:
        # In logs and traces; of a node also its place in the cluster, kept over restarts.
        - name: BATON_NAME
          valueFrom: { fieldRef: { fieldPath: metadata.name } }
        - name: POD_IP
          valueFrom: { fieldRef: { fieldPath: status.podIP } }
        {{- if and $hasEtcd $root.Values.etcd.auth.secretName }}
        - name: ETCD_USERNAME
          valueFrom: { secretKeyRef: { name: {{ $root.Values.etcd.auth.secretName }}, key: username } }
        - name: ETCD_PASSWORD
          valueFrom: { secretKeyRef: { name: {{ $root.Values.etcd.auth.secretName }}, key: password } }
        {{- end }}
        {{- if $isNode }}
        - name: BATON_ADVERTISE
          value: {{ printf "%s:%s" (include "baton.podAddress" $root) $port | quote }}
        - name: BATON_COORDINATORS
          value: {{ $hasEtcd | ternary (include "baton.etcd" $root) (printf "%s-control:%s" (include "baton.fullname" $root) (include "baton.port" "control")) | quote }}
        {{- else if $hasEtcd }}
        - name: BATON_CONTROL_ADVERTISE
          value: {{ printf "%s:%s" (include "baton.podAddress" $root) (include "baton.port" "control") | quote }}
        - name: BATON_MEMBERSHIP
          value: {{ include "baton.etcd" $root | quote }}
        {{- end }}
        {{- with $root.Values.otel.endpoint }}
        - name: OTEL_EXPORTER_OTLP_ENDPOINT
          value: {{ . | quote }}
        {{- end }}
        {{- if and $onGpu (not (has "CUDA_DEVICE_MAX_CONNECTIONS" $ownNames)) }}
        # Two pairs by NCCL have more streams than the driver's 8 hardware queues, and streams of one queue wait for each other.
        - { name: CUDA_DEVICE_MAX_CONNECTIONS, value: "32" }
        {{- end }}
        {{- if $byNccl }}
        - name: NCCL_SOCKET_IFNAME
          value: {{ $nccl.interface | quote }}
        {{- end }}
        {{- if $byIpc }}
        - name: BATON_SHM_DIRECT_SECRET
          valueFrom: { secretKeyRef: { name: {{ $root.Values.gpuTransports.cudaIpc.secretName }}, key: secret } }
        - name: NVIDIA_VISIBLE_DEVICES
          value: all
        {{- end }}
        {{- with $values.env }}{{ toYaml . | nindent 8 }}{{ end }}
      ports:
        - { name: http, containerPort: {{ $port }} }
        {{- if not $isNode }}
        - { name: control, containerPort: {{ include "baton.port" "control" }} }
        {{- end }}
      # Nothing is killed while it loads the model; from then on /health says that the process works, /ready that it can be
      # given work.
      {{- $hasTls := ternary $root.Values.tls.issuer $root.Values.coordinator.tls.secretName $isNode }}
      {{- $scheme := ternary "HTTP" "HTTPS" (empty $hasTls) }}
      startupProbe:
        httpGet: { path: /health, port: http, scheme: {{ $scheme }} }
        periodSeconds: 5
        failureThreshold: {{ $isNode | ternary (div (add ($values.startupSeconds | default 0) 4) 5) 12 }}
      livenessProbe:
        httpGet: { path: /health, port: http, scheme: {{ $scheme }} }
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 3
      readinessProbe:
        httpGet: { path: /ready, port: http, scheme: {{ $scheme }} }
        periodSeconds: 2
        timeoutSeconds: 2
        failureThreshold: 2
      {{- if $values.preStopSeconds }}
      lifecycle:
        preStop: { sleep: { seconds: {{ $values.preStopSeconds }} } }
      {{- end }}
      {{- $resources := deepCopy $values.resources }}
      {{- if $isNode }}
      {{- range $device := list $values.gpu $values.rdma }}
      {{- if $device.count }}
      {{- $_ := set $resources "limits" (merge (dict $device.resource $device.count) ($resources.limits | default dict)) }}
      {{- end }}
      {{- end }}
      {{- end }}
      resources: {{- toYaml $resources | nindent 8 }}
      securityContext:
        allowPrivilegeEscalation: false
        readOnlyRootFilesystem: true
        capabilities:
          drop: [ALL]
          {{- if and $isNode $values.rdma.count }}
          add: [IPC_LOCK]
          {{- end }}
      volumeMounts:
        - { name: config, mountPath: /etc/baton/{{ .role }}.toml, subPath: {{ .role }}.toml, readOnly: true }
        - { name: tmp, mountPath: /tmp }
        {{- if $onGpu }}
        - { name: kernels, mountPath: /var/cache/baton }
        {{- end }}
        {{- if and $byNccl (not $byIpc) }}
        - { name: shm, mountPath: /dev/shm }
        {{- end }}
        {{- if or $root.Values.model.volume $root.Values.model.pull }}
        - { name: models, mountPath: /models, readOnly: true }
        {{- end }}
        {{- if and $hasEtcd $root.Values.etcd.tls.secretName }}
        - { name: etcd-tls, mountPath: /etc/baton/etcd-tls, readOnly: true }
        {{- end }}
        {{- if and (not $isNode) $values.tls.secretName }}
        - { name: api-tls, mountPath: /etc/baton/api-tls, readOnly: true }
        {{- end }}
        {{- if and (not $isNode) $values.keys.secretName }}
        # The whole folder: a file that is mounted alone stays as it was when the Secret changes.
        - { name: keys, mountPath: /etc/baton/keys, readOnly: true }
        {{- end }}
        {{- if $root.Values.tls.issuer }}
        - { name: tls, mountPath: /etc/baton/tls, readOnly: true }
        {{- end }}
  volumes:
    - name: config
      configMap: { name: {{ include "baton.fullname" $root }}-{{ .role }} }
    - name: tmp
      emptyDir: { sizeLimit: 64Mi }
    {{- if $onGpu }}
    # The image's BATON_KERNEL_CACHE is in it.
    - name: kernels
      {{- toYaml ($values.gpu.kernelCache | default (dict "emptyDir" (dict))) | nindent 6 }}
    {{- end }}
    {{- if and $byNccl (not $byIpc) }}
    # For NCCL, which may need more than the usual 64 MiB.
    - name: shm
      emptyDir: { medium: Memory, sizeLimit: {{ $nccl.shmSize }} }
    {{- end }}
    {{- if or $root.Values.model.volume $root.Values.model.pull }}
    - name: models
      {{- toYaml ($root.Values.model.volume | default (dict "emptyDir" (dict))) | nindent 6 }}
    {{- end }}
    {{- if and $hasEtcd $root.Values.etcd.tls.secretName }}
    - name: etcd-tls
      secret: { secretName: {{ $root.Values.etcd.tls.secretName }} }
    {{- end }}
    {{- if and (not $isNode) $values.tls.secretName }}
    - name: api-tls
      secret: { secretName: {{ $values.tls.secretName }} }
    {{- end }}
    {{- if and (not $isNode) $values.keys.secretName }}
    - name: keys
      secret: { secretName: {{ $values.keys.secretName }}, items: [{ key: keys.toml, path: keys.toml }] }
    {{- end }}
    {{- with $root.Values.tls }}
    {{- if .issuer }}
    # A node may change its role, so its certificate names both.
    {{- $roles := $isNode | ternary (list "prefill" "decode") (list "coordinator") }}
    {{- $names := list }}
    {{- range $role := $roles }}{{ $names = append $names (printf "spiffe://%s/%s/${POD_NAME}" $root.Values.tls.cluster $role) }}{{ end }}
    - name: tls
      csi:
        driver: csi.cert-manager.io
        readOnly: true
        volumeAttributes:
          csi.cert-manager.io/issuer-name: {{ .issuer }}
          csi.cert-manager.io/issuer-kind: {{ .issuerKind }}
          csi.cert-manager.io/uri-sans: {{ join "," $names | quote }}
          csi.cert-manager.io/dns-names: "${POD_NAME}"
          csi.cert-manager.io/key-usages: "digital signature,server auth,client auth"
          csi.cert-manager.io/fs-group: {{ $root.Values.podSecurityContext.fsGroup | default 65532 | quote }}
    {{- end }}
    {{- end }}
  {{- with $values.nodeSelector }}
  nodeSelector: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.tolerations }}
  tolerations: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.affinity }}
  affinity: {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}
