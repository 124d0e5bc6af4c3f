//! Spans reach a collector named by the standard variables, with the names and without the noise; each case in a process of its own.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use std::process::{Command, Stdio};
use std::time::Duration;

use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{TraceService, TraceServiceServer};
use opentelemetry_proto::tonic::collector::trace::v1::{ExportTraceServiceRequest, ExportTraceServiceResponse};
use service_runtime::clock::Clock;
use service_runtime::telemetry::{self, Identity, MeasuredSpan};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Request, Response, Status};

const PARENT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

struct Collector(mpsc::Sender<ExportTraceServiceRequest>);

#[tonic::async_trait]
impl TraceService for Collector {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        let sent = self.0.send(request.into_inner()).await;
        sent.map_err(|_| Status::unavailable("the test is over"))?;
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

async fn collector() -> (String, mpsc::Receiver<ExportTraceServiceRequest>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    let (requests_in, requests) = mpsc::channel(16);
    let server = tonic::transport::Server::builder().add_service(TraceServiceServer::new(Collector(requests_in)));
    tokio::spawn(server.serve_with_incoming(TcpListenerStream::new(listener)));
    (endpoint, requests)
}

/// Runs `traced_process` below in a process of its own.
async fn run_traced(env: &[(&str, &str)]) -> (bool, String) {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--ignored", "--exact", "traced_process", "--nocapture"]);
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("OTEL_")) {
        command.env_remove(name);
    }
    command
        .envs(env.iter().copied())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let output = tokio::task::spawn_blocking(move || command.output().unwrap())
        .await
        .unwrap();
    let text = String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout);
    (output.status.success(), text)
}

/// Not a test of its own: the child process of the tests below.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "run as a child by the other tests"]
async fn traced_process() {
    let identity = Identity {
        service: "baton-decode",
        instance: "decode-0",
        version: "0.1.0",
        flavors: &[],
    };
    let telemetry = telemetry::init(identity).unwrap();
    {
        let span = tracing::info_span!("decode", otel.kind = "server", answer = 42);
        telemetry::set_parent(&span, telemetry::context_of_traceparent(PARENT));
        let is_disabled = std::env::var("OTEL_SDK_DISABLED").is_ok();
        let id = (!is_disabled).then(|| "4bf92f3577b34da6a3ce929d0e0e4736".to_owned());
        assert_eq!(telemetry::trace_id(&span), id);
        use tracing_opentelemetry::OpenTelemetrySpanExt as _;
        let now = Clock::now();
        MeasuredSpan::new("decode.queue", now, now + Duration::from_millis(5)).record_later(&span.context());
        let _inside = span.enter();
        tracing::info!("a line inside the span");
    }
    telemetry.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn spans_arrive_under_their_remote_parent_with_the_service_of_the_role() {
    let (endpoint, mut requests) = collector().await;
    let (ok, output) = run_traced(&[("OTEL_EXPORTER_OTLP_ENDPOINT", &endpoint)]).await;
    assert!(ok, "{output}");
    let mut spans = Vec::new();
    let mut resources = Vec::new();
    while let Ok(request) = requests.try_recv() {
        for resource_spans in request.resource_spans {
            resources.extend(resource_spans.resource.unwrap().attributes);
            spans.extend(resource_spans.scope_spans.into_iter().flat_map(|scope| scope.spans));
        }
    }
    let resource = format!("{resources:?}");
    assert!(
        resource.contains("baton-decode") && resource.contains("decode-0"),
        "{resource}"
    );
    let server = spans.iter().find(|span| span.name == "decode").unwrap();
    let queue = spans.iter().find(|span| span.name == "decode.queue").unwrap();
    assert_eq!(server.trace_id, 0x4bf92f3577b34da6a3ce929d0e0e4736u128.to_be_bytes());
    assert_eq!(server.parent_span_id, 0x00f067aa0ba902b7u64.to_be_bytes());
    assert_eq!(queue.parent_span_id, server.span_id);
    assert_eq!(queue.end_time_unix_nano - queue.start_time_unix_nano, 5_000_000);
    assert_eq!(server.kind, 2, "SERVER");
    let keys: Vec<&str> = server
        .attributes
        .iter()
        .map(|attribute| attribute.key.as_str())
        .collect();
    assert!(keys.contains(&"answer"), "{keys:?}");
    let noise =
        |key: &&str| key.starts_with("code.") || key.starts_with("thread.") || key.ends_with("_ns") || *key == "target";
    assert!(!keys.iter().any(noise), "{keys:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_disabled_sdk_exports_nothing_and_a_dead_collector_costs_seconds_at_most() {
    let (endpoint, mut requests) = collector().await;
    let disabled = [
        ("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint.as_str()),
        ("OTEL_SDK_DISABLED", "true"),
    ];
    let (ok, output) = run_traced(&disabled).await;
    assert!(ok, "{output}");
    assert!(requests.try_recv().is_err());
    let started = std::time::Instant::now();
    let (ok, output) = run_traced(&[("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")]).await;
    assert!(ok, "{output}");
    assert!(started.elapsed() < Duration::from_secs(8), "{:?}", started.elapsed());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn log_lines_are_json_and_carry_the_trace_id_with_no_collector_at_all() {
    let (ok, output) = run_traced(&[]).await;
    assert!(ok, "{output}");
    let line = output
        .lines()
        .find(|line| line.contains("a line inside the span"))
        .unwrap();
    let line: serde_json::Value = serde_json::from_str(line).unwrap();
    assert_eq!(line["trace_id"], "4bf92f3577b34da6a3ce929d0e0e4736");
    assert_eq!(line["message"], "a line inside the span");
    assert_eq!(line["level"], "INFO");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_standard_service_name_wins() {
    let (endpoint, mut requests) = collector().await;
    let env = [
        ("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint.as_str()),
        ("OTEL_SERVICE_NAME", "mine"),
    ];
    let (ok, output) = run_traced(&env).await;
    assert!(ok, "{output}");
    let request = requests.try_recv().unwrap();
    let resource = format!("{:?}", request.resource_spans[0].resource);
    assert!(
        resource.contains("mine") && !resource.contains("baton-decode"),
        "{resource}"
    );
}
