//! A node's process from role to role: one life after the other, with weights and port kept between them.

use engine::KeptWeights;
use service_runtime::config::ConfigError;
use service_runtime::joined::LifeEnd;
use service_runtime::process::ProcessConfig;
use service_runtime::serve::KeptPort;
use service_runtime::shutdown::Shutdown;
use service_runtime::telemetry::{self, Identity};
use serving_core::node::AssignedRole;
use thiserror::Error;

use super::packing;
use super::settings::NodeSettings;
use crate::model::PullError;

/// Why a node's process ended with a failure, in the words of its role.
#[derive(Debug, Error)]
pub enum NodeError {
    #[error(transparent)]
    Model(#[from] PullError),
    #[error(transparent)]
    Settings(#[from] ConfigError),
    #[error(transparent)]
    Run(#[from] node::RunError),
}

/// Runs a node until `shutdown`, or until it has been drained for good. A node that cannot start in its next role ends its
/// process; its supervisor starts it in its first role.
///
/// # Errors
/// [`NodeError`].
pub async fn run(settings: Result<NodeSettings, ConfigError>, shutdown: Shutdown) -> Result<(), NodeError> {
    let mut settings = settings?;
    let watch = packing::watch(settings.decode.name().to_owned());
    let kept = (KeptWeights::default().watched(watch), KeptPort::default());
    loop {
        let end = match settings.role {
            AssignedRole::Prefill => {
                prefill_node::live(settings.prefill.clone(), kept.clone(), shutdown.clone()).await?
            }
            AssignedRole::Decode | AssignedRole::CoLocated => {
                decode_node::live(settings.decode.clone(), kept.clone(), shutdown.clone()).await?
            }
        };
        let LifeEnd::ForRole(role) = end else {
            return Ok(());
        };
        if shutdown.is_requested() {
            return Ok(());
        }
        tracing::info!(
            role = role.name(),
            "the old role's work is done; starting in the new role"
        );
        settings.change_role(role);
        rename(&settings).await;
    }
}

/// In traces the two roles of a node differ by the service name.
async fn rename(settings: &NodeSettings) {
    let (service, version) = match settings.role {
        AssignedRole::Prefill => (prefill_node::Config::SERVICE, prefill_node::PROGRAM.version),
        AssignedRole::Decode | AssignedRole::CoLocated => (decode_node::Config::SERVICE, decode_node::PROGRAM.version),
    };
    // Both roles' settings have the same name and flavors.
    let identity = Identity {
        service,
        instance: settings.decode.name(),
        version,
        flavors: settings.decode.otel_flavors(),
    };
    if let Err(error) = telemetry::change_service(identity).await {
        tracing::warn!(%error, "spans keep the name of the old role");
    }
}
