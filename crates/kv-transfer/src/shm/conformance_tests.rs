//! Shared memory through the conformance suite, never falling back: each receiver in a runtime of its own, killed like a process.

use std::sync::Arc;

use async_trait::async_trait;

use super::{ShmConfig, serve};
use crate::choice::TransportKind;
use crate::conformance::{BLOCK_BYTES, Harness, Served, Setup, conformance_tests};
use crate::grpc::add_to_routes;
use crate::pairs::{PairConfig, PairTransport};
use crate::receiver::Receiver;
use crate::test_process;
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
        test_process::serve(address, move || {
            let mut routes = tonic::service::RoutesBuilder::default();
            add_to_routes(&mut routes, receiver.clone());
            let serving = serve(receiver, small_ring()).unwrap();
            let server = tonic::transport::Server::builder().add_routes(routes.routes());
            (server, serving)
        })
        .await
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
