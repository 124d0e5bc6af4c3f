//! Other processes for tests: a receiver of the conformance suite in a runtime of its own, so that it can be killed at once, as a
//! process is, and processes that really are some.

use std::process::Stdio;

use identity::Caller;
use tokio::io::{AsyncBufReadExt as _, BufReader, Lines};
use tokio::net::TcpListener;
use tokio::process::{Child, ChildStdout, Command};
use tokio_stream::wrappers::TcpListenerStream;
use tonic::service::{Routes, RoutesBuilder};
use tonic::transport::server::Router;

use crate::conformance::{Served, within};

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

/// The services of a port where everybody is taken.
pub(crate) fn in_plain_text(routes: RoutesBuilder) -> Routes {
    let router = routes.routes().into_axum_router();
    Routes::from(router.layer(axum::Extension(Caller::PlainText)))
}

/// This test program once more, as another node's process: it runs one test, which finds a variable set.
pub(crate) struct Process {
    child: Child,
    said: Lines<BufReader<ChildStdout>>,
}

impl Process {
    /// `test` is the whole path of a test. Its variables are those of this process and these.
    pub(crate) fn start(test: &str, variables: &[(&str, &str)]) -> Self {
        let mut child = Command::new(std::env::current_exe().expect("its own path"))
            .args(["--nocapture", "--exact", test])
            .envs(variables.iter().copied())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .expect("it starts");
        let said = BufReader::new(child.stdout.take().expect("it is piped")).lines();
        Self { child, said }
    }

    /// Waits for a line with this word, and returns what follows it.
    pub(crate) async fn says(&mut self, word: &str) -> String {
        within(word, async {
            loop {
                let line = self.said.next_line().await.expect("text").expect("it lives");
                if let Some((_, rest)) = line.split_once(word) {
                    return rest.trim().to_owned();
                }
            }
        })
        .await
    }

    pub(crate) async fn kill(&mut self) {
        self.child.kill().await.expect("it was alive");
    }
}
