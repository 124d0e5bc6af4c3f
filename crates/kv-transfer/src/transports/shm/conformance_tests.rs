//! Both modes of shared memory through the conformance suite, never falling back: each receiver in a runtime of its own, killed like a process.

use std::sync::Arc;

use async_trait::async_trait;

use super::{ShmConfig, serve};
use crate::choice::TransportKind;
use crate::conformance::{BLOCK_BYTES, Harness, LAYER_BYTES, LAYERS, Recorder, Served};
use crate::grpc::add_to_routes;
use crate::pairs::PairConfig;
use crate::receiver::Receiver;
use crate::test_process;
use crate::{DirectOffer, DirectWish, shm};

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
        shm::KIND
    }

    async fn serve(&self, receiver: Arc<Receiver>, _: Arc<Recorder>, address: &str) -> Served {
        test_process::serve(address, move || {
            let mut routes = tonic::service::RoutesBuilder::default();
            add_to_routes(&mut routes, receiver.clone());
            let serving = serve(&receiver, small_ring()).unwrap();
            let server = tonic::transport::Server::builder().add_routes(test_process::in_plain_text(routes));
            (server, serving)
        })
        .await
    }

    fn config(&self, config: PairConfig) -> PairConfig {
        PairConfig {
            transports: vec![shm::KIND],
            ..config
        }
    }
}

mod staged {
    crate::conformance::conformance_tests!(super::Shm);
}

mod staged_on_device {
    use crate::conformance::{MemoryKind, On};

    crate::conformance::conformance_tests!(On(MemoryKind::Device, super::Shm));
}

mod staged_on_cuda {
    use crate::conformance::{MemoryKind, On};

    crate::conformance::conformance_tests!(On(MemoryKind::Cuda, super::Shm));
}

/// The same, written in place. What the suite supposes of a sender holds here by its word: it is trusted not to change a
/// frame's bytes after the header, so there is no case here for a sender that does (`shm/tests.rs` has it for the ring).
struct ShmDirect;

#[async_trait]
impl Harness for ShmDirect {
    fn kind(&self) -> TransportKind {
        shm::DIRECT
    }

    async fn serve(&self, receiver: Arc<Receiver>, sink: Arc<Recorder>, address: &str) -> Served {
        test_process::serve(address, move || {
            let mut routes = tonic::service::RoutesBuilder::default();
            add_to_routes(&mut routes, receiver.clone());
            let direct = DirectOffer {
                secret: "of this test".parse().unwrap(),
                pool: sink,
                has_checksums: true,
            };
            let config = ShmConfig {
                direct: Some(direct),
                ..small_ring()
            };
            let serving = serve(&receiver, config).unwrap();
            let server = tonic::transport::Server::builder().add_routes(test_process::in_plain_text(routes));
            (server, serving)
        })
        .await
    }

    fn config(&self, config: PairConfig) -> PairConfig {
        PairConfig {
            transports: vec![shm::KIND],
            direct: Some(DirectWish {
                secret: "of this test".parse().unwrap(),
                layers: LAYERS,
                layer_bytes: LAYER_BYTES as u32,
            }),
            ..config
        }
    }
}

mod direct {
    crate::conformance::conformance_tests!(super::ShmDirect);
}
