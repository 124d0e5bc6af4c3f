//! gRPC through the conformance suite: each receiver in a runtime of its own, killed like a process.

use std::sync::Arc;

use async_trait::async_trait;
use tokio::net::TcpListener;
use tokio_stream::wrappers::TcpListenerStream;

use super::add_to_routes;
use crate::choice::TransportKind;
use crate::conformance::{Harness, Served, Setup, conformance_tests};
use crate::pairs::{PairConfig, PairTransport};
use crate::receiver::Receiver;
use crate::transport::Transport;

struct Grpc;

#[async_trait]
impl Harness for Grpc {
    fn kind(&self) -> TransportKind {
        TransportKind::Grpc
    }

    async fn serve(&self, receiver: Arc<Receiver>, address: &str) -> Served {
        let bind = if address.is_empty() { "127.0.0.1:0" } else { address }.to_owned();
        let (bound_in, bound) = tokio::sync::oneshot::channel();
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_multi_thread()
                .worker_threads(1)
                .enable_all()
                .build()
                .unwrap();
            let _server = runtime.spawn(async move {
                let listener = TcpListener::bind(bind).await.unwrap();
                bound_in.send(listener.local_addr().unwrap()).unwrap();
                let mut routes = tonic::service::RoutesBuilder::default();
                add_to_routes(&mut routes, receiver);
                // Small windows, so that a receiver that stands still is felt by the sender at once.
                tonic::transport::Server::builder()
                    .initial_stream_window_size(256 << 10)
                    .initial_connection_window_size(256 << 10)
                    .add_routes(routes.routes())
                    .serve_with_incoming(TcpListenerStream::new(listener))
                    .await
                    .unwrap();
            });
            let _ = runtime.block_on(stopped);
            runtime.shutdown_background();
        });
        Served {
            address: bound.await.unwrap().to_string(),
            kill: Box::new(move || drop(stop)),
        }
    }

    fn transport(&self, setup: Setup) -> Box<dyn Transport> {
        Box::new(PairTransport::new(PairConfig {
            transports: vec![TransportKind::Grpc],
            in_flight_bytes_max: 1 << 20,
            stall_window: setup.stall_window,
            tap: setup.tap,
            ..PairConfig::new(setup.me, setup.compatibility)
        }))
    }
}

conformance_tests!(Grpc);
