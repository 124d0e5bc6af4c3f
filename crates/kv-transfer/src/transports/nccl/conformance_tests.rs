//! NCCL through the conformance suite, never falling back, on the false driver and the false NCCL: both ranks are in this process.

use std::sync::{Arc, LazyLock};

use async_trait::async_trait;

use super::group::RingShape;
use super::rings::Rings;
use super::serve::{NcclConfig, serve};
use super::{cuda_library, library::Library};
use crate::choice::TransportKind;
use crate::conformance::{BLOCK_BYTES, CudaSource, Harness, LAYER_BYTES, MemoryKind, Recorder, Served};
use crate::grpc::add_to_routes;
use crate::pairs::PairConfig;
use crate::receiver::Receiver;
use crate::{DeviceEnd, test_process};

pub(super) struct ByNccl;

/// The decode nodes' end has one library and one set of rings, as a node has.
static DECODE: LazyLock<(Arc<dyn Library>, Arc<Rings>)> = LazyLock::new(|| {
    let kv = crate::conformance::false_cuda::pool(1);
    let library = cuda_library::open(&kv).expect("the false NCCL");
    (library, Rings::new(kv))
});

/// So few slots that a receiver that stands still is felt by the sender at once.
fn config() -> NcclConfig {
    NcclConfig {
        ring: RingShape {
            slots: 64,
            slot_bytes: BLOCK_BYTES as u32,
        },
        communicators_max: 256,
        ..NcclConfig::new(LAYER_BYTES, true)
    }
}

#[async_trait]
impl Harness for ByNccl {
    fn kind(&self) -> TransportKind {
        super::KIND
    }

    async fn serve(&self, receiver: Arc<Receiver>, _: Arc<Recorder>, address: &str) -> Served {
        test_process::serve(address, move || {
            let mut routes = tonic::service::RoutesBuilder::default();
            add_to_routes(&mut routes, receiver.clone());
            let serving = serve(&receiver, config(), DECODE.clone());
            let server = tonic::transport::Server::builder().add_routes(test_process::in_plain_text(routes));
            (server, serving)
        })
        .await
    }

    fn config(&self, config: PairConfig) -> PairConfig {
        let end = DeviceEnd {
            kv: CudaSource::shared().kv(),
            in_place: None,
            has_checksums: false,
        };
        config.on_device(Some(end)).over(vec![super::KIND])
    }

    fn memory(&self) -> MemoryKind {
        MemoryKind::Cuda
    }
}

crate::conformance::conformance_tests!(ByNccl);
