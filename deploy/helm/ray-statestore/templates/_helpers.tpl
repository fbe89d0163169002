{{- define "statestore.name" -}}
{{ .Release.Name | trunc 40 | trimSuffix "-" }}
{{- end }}

{{- define "statestore.selector" -}}
app.kubernetes.io/name: ray-statestore
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "statestore.labels" -}}
{{ include "statestore.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "statestore.environment" -}}
- name: RAY_worker_niceness          # Ray's 15 would leave executors and hosts a thirtieth of a busy processor
  value: "0"
{{- with .Values.env }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "statestore.mounts" -}}
- name: scratch
  mountPath: /tmp
{{- with .Values.stream.configMap }}
- name: streams
  mountPath: /opt/streams
  readOnly: true
{{- end }}
{{- if .Values.checkpoints.claimName }}
- name: checkpoints
  mountPath: {{ .Values.checkpoints.mountPath }}
{{- end }}
{{- end }}

{{- define "statestore.volumes" -}}
{{- with .Values.stream.configMap }}
- name: streams
  configMap:
    name: {{ . }}
{{- end }}
{{- with .Values.checkpoints.claimName }}
- name: checkpoints
  persistentVolumeClaim:
    claimName: {{ . }}
{{- end }}
{{- end }}

{{/* What the pods of the head and of workers share; call it with (dict "root" $ "role" "head"). */}}
{{- define "statestore.pod" -}}
{{- $of := ternary .root.Values.head .root.Values.workers (eq .role "head") -}}
metadata:
  labels:
    {{- include "statestore.selector" .root | nindent 4 }}
    app.kubernetes.io/component: {{ .role }}
  {{- with $of.annotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  serviceAccountName: {{ include "statestore.name" .root }}
  securityContext:
    runAsNonRoot: true
    runAsUser: 1000
    runAsGroup: 100
    fsGroup: 100
    seccompProfile:
      type: RuntimeDefault
  {{- with .root.Values.image.pullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . }}
    {{- end }}
  {{- end }}
  {{- with $of.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $of.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- if eq .role "worker" }}
  terminationGracePeriodSeconds: 120
  topologySpreadConstraints:         # a machine that dies takes few hosts with it
    - maxSkew: 1
      topologyKey: kubernetes.io/hostname
      whenUnsatisfiable: ScheduleAnyway
      labelSelector:
        matchLabels:
          {{- include "statestore.selector" .root | nindent 10 }}
          app.kubernetes.io/component: worker
  {{- end }}
  containers:
    - name: ray-{{ .role }}
      image: {{ .root.Values.image.repository }}:{{ .root.Values.image.tag | default .root.Chart.AppVersion }}
      imagePullPolicy: {{ .root.Values.image.pullPolicy }}
      securityContext:
        allowPrivilegeEscalation: false
        capabilities:
          drop: [ALL]
      env:
        {{- include "statestore.environment" .root | nindent 8 }}
      ports:
        - name: metrics
          containerPort: 8080
        {{- if eq .role "head" }}
        - name: gcs-server
          containerPort: 6379
        - name: dashboard
          containerPort: 8265
        {{- end }}
        {{- if eq .root.Values.mode "service" }}
        - name: serve
          containerPort: {{ .root.Values.stateApi.port }}
        {{- end }}
      resources:                     # limits are requests, so that no neighbour takes what state needs
        requests:
          cpu: {{ $of.cpu | quote }}
          memory: {{ $of.memory }}
        limits:
          cpu: {{ $of.cpu | quote }}
          memory: {{ $of.memory }}
      volumeMounts:
        {{- include "statestore.mounts" .root | nindent 8 }}
  volumes:
    - name: scratch
      emptyDir:
        sizeLimit: {{ .root.Values.workers.disk }}
    {{- with include "statestore.volumes" .root }}
    {{- . | nindent 4 }}
    {{- end }}
{{- end }}

{{/* The spec of a RayCluster, which a RayJob and a RayService have inside. */}}
{{- define "statestore.cluster" -}}
rayVersion: {{ .Values.rayVersion | quote }}
{{- if .Values.auth.enabled }}
authOptions:
  mode: token
  {{- with .Values.auth.secretName }}
  secretName: {{ . }}
  {{- end }}
{{- end }}
{{- if .Values.gcs.redisAddress }}
gcsFaultToleranceOptions:
  redisAddress: {{ .Values.gcs.redisAddress }}
  {{- with .Values.gcs.redisPasswordSecret }}
  redisPassword:
    valueFrom:
      secretKeyRef:
        name: {{ . }}
        key: redis-password
  {{- end }}
{{- end }}
{{- if .Values.autoscaling.enabled }}
enableInTreeAutoscaling: true
autoscalerOptions:
  version: v2
  idleTimeoutSeconds: {{ .Values.autoscaling.idleTimeoutSeconds }}
{{- end }}
headGroupSpec:
  rayStartParams:
    num-cpus: "0"                    # no executors next to the driver and the coordinator
    dashboard-host: 0.0.0.0
  template:
    {{- include "statestore.pod" (dict "root" . "role" "head") | nindent 4 }}
workerGroupSpecs:
  - groupName: workers
    replicas: {{ .Values.workers.replicas }}
    minReplicas: {{ .Values.workers.minReplicas }}
    maxReplicas: {{ .Values.workers.maxReplicas }}
    rayStartParams: {}
    template:
      {{- include "statestore.pod" (dict "root" . "role" "worker") | nindent 6 }}
{{- end }}
