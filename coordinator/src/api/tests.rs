//! An edge for unit tests: the real model's text, and nobody behind it.

use std::sync::Arc;
use std::time::Duration;

use grammar::Grammars;
use service_runtime::http_guard::HttpGuard;

use super::{ApiLimits, AppParts, AppState, NoMetrics};
use crate::keys::HeldKey;
use crate::keys::file::Limits;
use crate::keys::secret::SecretKey;
use crate::keys::test_kit::{entry, keys_of};
use crate::request_handle::{Readiness, Rejected, RequestHandle, Submission, Submit};
use crate::text::TextModel;

const BODY_BYTES_MAX: usize = 1 << 20;
/// Longer than a task takes that nothing holds up.
pub(super) const PATIENCE: Duration = Duration::from_secs(20);

/// Nothing is submitted here.
struct Nobody;

#[async_trait::async_trait]
impl Submit for Nobody {
    async fn submit(&self, _: Submission) -> Result<RequestHandle, Rejected> {
        unreachable!("the work of the edge alone is tested")
    }
    fn readiness(&self) -> Readiness {
        Readiness::Draining
    }
}

pub(super) fn state(grammars: Grammars) -> AppState {
    let text = TextModel::open(&model_files::test_kit::model_path(), None).expect("the real model");
    let parts = AppParts {
        submit: Arc::new(Nobody),
        text: Arc::new(text),
        served_models: vec!["tiny".to_owned()],
        metrics: Arc::new(NoMetrics),
        limits: ApiLimits {
            body_bytes_max: BODY_BYTES_MAX,
            request_bytes_in_flight_max: BODY_BYTES_MAX,
            request_time_limit: Duration::from_secs(60),
        },
        insight: Arc::default(),
        guard: HttpGuard::default(),
        cors_origins: Vec::new(),
        keys: None,
    };
    AppState {
        grammars: Arc::new(grammars),
        ..AppState::new(parts)
    }
}

/// The key of a client with these limits.
pub(super) fn key(limits: Limits) -> Arc<HeldKey> {
    let (folder, secret) = (tempfile::tempdir().expect("a folder"), SecretKey::random());
    let file = folder.path().join("keys.toml");
    let keys = keys_of(&file, vec![entry("client", secret.text(), limits)]);
    keys.find(secret.text()).expect("it is there")
}
