//! `CacheService`: orders about a node's prefix cache, which belong to no request. The loop carries them out.

use std::sync::Arc;

use proto::v1;
use proto::v1::cache_service_server::{CacheService, CacheServiceServer};
use tonic::service::RoutesBuilder;
use tonic::{Request, Response, Status};

use crate::inbox::Inbox;

/// Adds the service to a node's port.
pub(crate) fn add_to_routes(routes: &mut RoutesBuilder, inbox: Arc<Inbox>) {
    routes.add_service(CacheServiceServer::new(Service { inbox }));
}

#[derive(Debug)]
struct Service {
    inbox: Arc<Inbox>,
}

#[tonic::async_trait]
impl CacheService for Service {
    async fn reset_prefix_cache(
        &self,
        _: Request<v1::ResetPrefixCacheRequest>,
    ) -> Result<Response<v1::ResetPrefixCacheReply>, Status> {
        let answered = self.inbox.reset_prefix_cache().await;
        let reset = answered.map_err(|_| {
            Status::unavailable("the node's loop takes no order now: it has ended, or too many wait; ask again")
        })?;
        tracing::info!(
            dropped_blocks = reset.dropped_blocks,
            kept_blocks = reset.kept_blocks,
            "the prefix cache was reset by an order"
        );
        Ok(Response::new(reset.into()))
    }
}
