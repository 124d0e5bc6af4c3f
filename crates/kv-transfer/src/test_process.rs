//! A receiver of the conformance suite in a runtime of its own, so that it can be killed at once, as a process is.

use tokio::net::TcpListener;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::transport::server::Router;

use crate::conformance::Served;

/// Serves what `start` makes, on any free port when `address` is empty. `start` runs inside the new runtime; what it
/// returns beside the router lives as long as the server.
pub(crate) async fn serve<G: Send + 'static>(
    address: &str,
    start: impl FnOnce() -> (Router, G) + Send + 'static,
) -> Served {
    let bind = if address.is_empty() { "127.0.0.1:0" } else { address }.to_owned();
    let (bound_in, bound) = tokio::sync::oneshot::channel();
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .expect("a runtime");
        let _server = runtime.spawn(async move {
            let listener = TcpListener::bind(bind).await.expect("a free port");
            let address = listener.local_addr().expect("it is bound");
            bound_in.send(address).expect("the test waits");
            let (router, _kept) = start();
            let incoming = TcpListenerStream::new(listener);
            router.serve_with_incoming(incoming).await.expect("serves");
        });
        let _ = runtime.block_on(stopped);
        runtime.shutdown_background();
    });
    Served {
        address: bound.await.expect("the server listens").to_string(),
        kill: Box::new(move || drop(stop)),
    }
}
