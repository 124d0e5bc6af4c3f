//! Further methods of the handoff service: control streams of transports whose bytes do not travel in them. They use the port
//! that every node has, so a transport needs no port of its own for them.

use std::fmt::Debug;

use http::{Request, Response};
use tonic::body::Body;

/// Takes the calls of one method.
pub(crate) trait StreamEnd: Send + Sync + Debug {
    /// `/service/method`.
    fn path(&self) -> &'static str;

    /// Never waits: a stream is served by a task.
    fn take(&self, call: Request<Body>) -> Response<Body>;
}
