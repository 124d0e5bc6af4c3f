//! CUDA IPC through the conformance suite, never falling back, on the device of the false driver. Both nodes are in this process, so
//! the pool is known by its address; `tests.rs` has the pools of other processes.

use std::sync::Arc;

use async_trait::async_trait;

use super::serve::{IpcConfig, serve};
use crate::choice::TransportKind;
use crate::conformance::{CudaSource, Harness, LAYER_BYTES, LAYERS, MemoryKind, Recorder, Served};
use crate::grpc::add_to_routes;
use crate::pairs::PairConfig;
use crate::receiver::Receiver;
use crate::test_process;
use crate::{DeviceEnd, DevicePlace, DirectWish};

pub(super) struct CudaIpc;

/// The decode node's end. So few frames are under way that a receiver that stands still is felt by the sender at once.
pub(super) fn config(sink: &Arc<Recorder>, has_checksums: bool) -> IpcConfig {
    let place = DevicePlace {
        secret: "of this test".parse().unwrap(),
        pool: sink.clone(),
    };
    let end = DeviceEnd {
        kv: sink.device().expect("blocks on the device"),
        in_place: Some(place),
        has_checksums,
    };
    IpcConfig {
        frames_in_flight: 64,
        ..IpcConfig::of(&end, rustix::process::geteuid().as_raw()).unwrap()
    }
}

/// The prefill node's end.
pub(super) fn sending(config: PairConfig) -> PairConfig {
    let wish = DirectWish {
        secret: "of this test".parse().unwrap(),
        layers: LAYERS,
        layer_bytes: LAYER_BYTES as u32,
    };
    let end = DeviceEnd {
        kv: CudaSource::shared().kv(),
        in_place: None,
        has_checksums: false,
    };
    let config = config.writing_in_place(Some(wish)).on_device(Some(end));
    config.over(vec![super::KIND])
}

#[async_trait]
impl Harness for CudaIpc {
    fn kind(&self) -> TransportKind {
        super::KIND
    }

    async fn serve(&self, receiver: Arc<Receiver>, sink: Arc<Recorder>, address: &str) -> Served {
        test_process::serve(address, move || {
            let mut routes = tonic::service::RoutesBuilder::default();
            add_to_routes(&mut routes, receiver.clone());
            let serving = serve(&receiver, config(&sink, true)).unwrap();
            let server = tonic::transport::Server::builder().add_routes(test_process::in_plain_text(routes));
            (server, serving)
        })
        .await
    }

    fn config(&self, config: PairConfig) -> PairConfig {
        sending(config)
    }

    fn memory(&self) -> MemoryKind {
        MemoryKind::Cuda
    }
}

crate::conformance::conformance_tests!(CudaIpc);
