//! gRPC through the conformance suite: each receiver in a runtime of its own, killed like a process.

use std::sync::Arc;

use async_trait::async_trait;

use super::add_to_routes;
use crate::choice::TransportKind;
use crate::conformance::{Harness, Recorder, Served, Setup, conformance_tests};
use crate::pairs::PairConfig;
use crate::receiver::Receiver;
use crate::test_process;
use crate::transport::Transport;
use crate::{grpc, transports};

struct Grpc;

#[async_trait]
impl Harness for Grpc {
    fn kind(&self) -> TransportKind {
        grpc::KIND
    }

    async fn serve(&self, receiver: Arc<Receiver>, _: Arc<Recorder>, address: &str) -> Served {
        test_process::serve(address, move || {
            let mut routes = tonic::service::RoutesBuilder::default();
            add_to_routes(&mut routes, receiver);
            // Small windows, so that a receiver that stands still is felt by the sender at once.
            let server = tonic::transport::Server::builder()
                .initial_stream_window_size(256 << 10)
                .initial_connection_window_size(256 << 10)
                .add_routes(routes.routes());
            (server, ())
        })
        .await
    }

    fn transport(&self, setup: Setup) -> Box<dyn Transport> {
        Box::new(transports::pairs(PairConfig {
            transports: vec![grpc::KIND],
            in_flight_bytes_max: 1 << 20,
            stall_window: setup.stall_window,
            tap: setup.tap,
            ..PairConfig::new(setup.me, setup.compatibility)
        }))
    }
}

conformance_tests!(Grpc);

mod on_device {
    crate::conformance::conformance_tests!(crate::conformance::OnDevice(super::Grpc));
}
