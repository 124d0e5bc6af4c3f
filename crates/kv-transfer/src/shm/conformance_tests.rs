//! Shared memory through the conformance suite, never falling back: each receiver in a runtime of its own, killed like a process.

use std::sync::Arc;

use async_trait::async_trait;
use tokio::net::TcpListener;
use tokio_stream::wrappers::TcpListenerStream;

use super::{ShmConfig, serve};
use crate::choice::TransportKind;
use crate::conformance::{BLOCK_BYTES, Harness, Served, Setup, conformance_tests};
use crate::grpc::add_to_routes;
use crate::pairs::{PairConfig, PairTransport};
use crate::receiver::Receiver;
use crate::transport::Transport;

struct Shm;

/// So few slots that a receiver that stands still is felt by the sender at once.
fn small_ring() -> ShmConfig {
    ShmConfig {
        ring_bytes: 1 << 20,
        slot_bytes: BLOCK_BYTES as u32,
        ..ShmConfig::new(0)
    }
}

#[async_trait]
impl Harness for Shm {
    fn kind(&self) -> TransportKind {
        TransportKind::Shm
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
                add_to_routes(&mut routes, receiver.clone());
                let _serving = serve(receiver, small_ring()).unwrap();
                tonic::transport::Server::builder()
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
            transports: vec![TransportKind::Shm],
            stall_window: setup.stall_window,
            tap: setup.tap,
            ..PairConfig::new(setup.me, setup.compatibility)
        }))
    }
}

conformance_tests!(Shm);
