//! An edge for unit tests: the real model's text, and nobody behind it.

use std::sync::Arc;
use std::time::Duration;

use grammar::Grammars;
use service_runtime::http_guard::HttpGuard;

use super::{ApiLimits, AppParts, AppState, NoMetrics};
use crate::keys::file::{ClientKey, KeyFile, Limits, Scope};
use crate::keys::secret::{KeyHash, SecretKey};
use crate::keys::{HeldKey, Keys};
use crate::request_handle::{Readiness, Rejected, RequestHandle, Submission, Submit};
use crate::text::TextModel;

const BODY_BYTES_MAX: usize = 1 << 20;

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
    let entry = ClientKey {
        name: "client".parse().expect("a name"),
        sha256: KeyHash::of(secret.text()),
        scopes: [Scope::Inference].into(),
        tenant: None,
        lane: None,
        weight: None,
        limits,
    };
    let all = KeyFile {
        keys: vec![entry],
        ..KeyFile::default()
    };
    all.save(&file).expect("it is written");
    let keys = Keys::open(&file, 8000).expect("it is read");
    keys.find(secret.text()).expect("it is there")
}
