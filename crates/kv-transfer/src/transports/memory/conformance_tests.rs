//! The in-memory transport through the conformance suite, never falling back: each receiver in a runtime of its own.

use std::sync::Arc;

use async_trait::async_trait;

use crate::choice::TransportKind;
use crate::conformance::{Harness, LAYER_BYTES, MemoryKind, On, Recorder, Served, conformance_tests};
use crate::link::ReceivingEnd;
use crate::pairs::PairConfig;
use crate::receiver::Receiver;
use crate::{grpc, test_process, transports};

struct Memory;

#[async_trait]
impl Harness for Memory {
    fn kind(&self) -> TransportKind {
        super::KIND
    }

    async fn serve(&self, receiver: Arc<Receiver>, _: Arc<Recorder>, address: &str) -> Served {
        test_process::serve(address, move || {
            let mut routes = tonic::service::RoutesBuilder::default();
            grpc::add_to_routes(&mut routes, receiver.clone());
            let end = ReceivingEnd {
                layer_bytes: LAYER_BYTES,
                direct: None,
            };
            let serving = transports::serve(&receiver, &[super::KIND], &end);
            let server = tonic::transport::Server::builder().add_routes(test_process::in_plain_text(routes));
            (server, serving)
        })
        .await
    }

    fn config(&self, config: PairConfig) -> PairConfig {
        PairConfig {
            in_flight_bytes_max: 1 << 20,
            ..config.over(vec![super::KIND])
        }
    }
}

conformance_tests!(Memory);

mod on_device {
    super::conformance_tests!(super::On(super::MemoryKind::Device, super::Memory));
}
