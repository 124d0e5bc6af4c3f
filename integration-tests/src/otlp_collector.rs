//! A collector that keeps what it gets: OTLP over gRPC, as the processes are told by the standard variable.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::Result;
use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{TraceService, TraceServiceServer};
use opentelemetry_proto::tonic::collector::trace::v1::{ExportTraceServiceRequest, ExportTraceServiceResponse};
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::trace::v1::ResourceSpans;
use tokio::net::TcpListener;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Request, Response, Status};

/// What is compared of a span.
#[derive(Clone, Debug, PartialEq)]
pub struct Collected {
    pub name: String,
    pub service: String,
    pub parent: Option<String>,
    pub length_ms: f64,
}

type ByTrace = BTreeMap<String, BTreeMap<String, Collected>>;

#[derive(Clone, Debug, Default)]
struct Kept(Arc<Mutex<ByTrace>>);

/// Serves until the test's runtime ends.
#[derive(Debug)]
pub struct Collector {
    endpoint: String,
    kept: Kept,
}

fn hex(id: &[u8]) -> String {
    id.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn service_of(resource: &ResourceSpans) -> String {
    let attributes = resource.resource.iter().flat_map(|resource| &resource.attributes);
    let name = attributes.into_iter().find(|pair| pair.key == "service.name");
    match name.and_then(|pair| pair.value.as_ref()?.value.as_ref()) {
        Some(Value::StringValue(text)) => text.clone(),
        _ => String::new(),
    }
}

#[tonic::async_trait]
impl TraceService for Kept {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for resource in request.into_inner().resource_spans {
            let service = service_of(&resource);
            for span in resource.scope_spans.iter().flat_map(|scope| &scope.spans) {
                let nanoseconds = span.end_time_unix_nano as f64 - span.start_time_unix_nano as f64;
                let collected = Collected {
                    name: span.name.clone(),
                    service: service.clone(),
                    parent: Some(hex(&span.parent_span_id)).filter(|id| !id.is_empty()),
                    length_ms: nanoseconds / 1e6,
                };
                kept.entry(hex(&span.trace_id))
                    .or_default()
                    .insert(hex(&span.span_id), collected);
            }
        }
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

impl Collector {
    /// # Errors
    /// No free port.
    pub async fn start() -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let endpoint = format!("http://{}", listener.local_addr()?);
        let kept = Kept::default();
        let server = tonic::transport::Server::builder().add_service(TraceServiceServer::new(kept.clone()));
        tokio::spawn(server.serve_with_incoming(TcpListenerStream::new(listener)));
        Ok(Self { endpoint, kept })
    }

    pub fn endpoint(&self) -> &str {
        &self.endpoint
    }

    /// Of one trace, by span id.
    pub fn spans(&self, trace: &str) -> BTreeMap<String, Collected> {
        let kept = self.kept.0.lock().unwrap_or_else(PoisonError::into_inner);
        kept.get(trace).cloned().unwrap_or_default()
    }
}
