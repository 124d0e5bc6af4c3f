//! `/admin/reports`: the reports of a folder that the operator names (`--reports-dir`), listed and shown.
//!
//! A name from a client is never part of a path: it is looked up in the list of what the folder has.

use std::io::Read as _;
use std::path::{Path as FilePath, PathBuf};
use std::sync::Arc;
use std::time::UNIX_EPOCH;

use axum::Json;
use axum::extract::{Path, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;

use super::AppState;
use super::error::{ApiError, short};

/// A report is somebody's file. It may show itself with its own styles, and nothing else: no script, no request, no form.
const POLICY: &str = "sandbox; default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; \
                      form-action 'none'; frame-ancestors 'self'";
/// What `baton compare --out` and `baton report --out` write into a folder.
const FILE: &str = "report.html";
/// The newest ones are listed.
const LISTED_MAX: usize = 200;
/// Entries of the folder that are looked at.
const ENTRIES_MAX: usize = 10_000;
/// Reports have at most 3 MB; a larger file is something else.
const BYTES_MAX: u64 = 16 << 20;

#[derive(Debug, Serialize)]
pub struct ReportsPage {
    /// False: the coordinator was started without `--reports-dir`.
    is_enabled: bool,
    /// The newest first.
    reports: Vec<ReportEntry>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
struct ReportEntry {
    name: String,
    bytes: u64,
    modified_unix_ms: u64,
    #[serde(skip)]
    path: PathBuf,
}

pub async fn list(State(state): State<Arc<AppState>>) -> Result<Json<ReportsPage>, ApiError> {
    let Some(folder) = state.insight.reports_dir.clone() else {
        return Ok(Json(ReportsPage {
            is_enabled: false,
            reports: Vec::new(),
        }));
    };
    let reports = tokio::task::spawn_blocking(move || entries(&folder)).await;
    Ok(Json(ReportsPage {
        is_enabled: true,
        reports: reports.map_err(|_| unreadable())?.map_err(|_| unreadable())?,
    }))
}

pub async fn one(State(state): State<Arc<AppState>>, Path(name): Path<String>) -> Result<Response, ApiError> {
    let folder = state.insight.reports_dir.clone().ok_or_else(|| unknown(&name))?;
    let wanted = name.clone();
    let found = tokio::task::spawn_blocking(move || {
        let entry = entries(&folder)?.into_iter().find(|entry| entry.name == wanted);
        entry.map(|entry| content(&entry.path)).transpose()
    });
    let content = found.await.map_err(|_| unreadable())?.map_err(|_| unreadable())?;
    let mut response = content.ok_or_else(|| unknown(&name))?.into_response();
    for (name, value) in [
        (header::CONTENT_TYPE, "text/html; charset=utf-8"),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        (header::CACHE_CONTROL, "no-cache"),
    ] {
        response.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    Ok(response)
}

/// `NAME/report.html` and `NAME.html`. Links are left out: they could lead anywhere.
fn entries(folder: &FilePath) -> std::io::Result<Vec<ReportEntry>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder)?.take(ENTRIES_MAX) {
        let entry = entry?;
        // A name that is no UTF-8 cannot be in an address.
        let (Ok(name), Ok(kind)) = (entry.file_name().into_string(), entry.file_type()) else {
            continue;
        };
        let (name, path) = match name.strip_suffix(".html") {
            Some(stem) if kind.is_file() => (stem.to_owned(), entry.path()),
            None if kind.is_dir() => (name, entry.path().join(FILE)),
            _ => continue,
        };
        let Ok(facts) = std::fs::symlink_metadata(&path) else {
            continue;
        };
        if facts.is_file() && facts.len() <= BYTES_MAX && !name.is_empty() {
            let modified = facts.modified().ok().and_then(|at| at.duration_since(UNIX_EPOCH).ok());
            found.push(ReportEntry {
                name,
                bytes: facts.len(),
                modified_unix_ms: modified.map_or(0, |since| since.as_millis() as u64),
                path,
            });
        }
    }
    found.sort_by(|a, b| {
        b.modified_unix_ms
            .cmp(&a.modified_unix_ms)
            .then_with(|| a.name.cmp(&b.name))
    });
    found.truncate(LISTED_MAX);
    Ok(found)
}

/// The file may have grown since it was listed.
fn content(path: &FilePath) -> std::io::Result<Vec<u8>> {
    let mut content = Vec::new();
    std::fs::File::open(path)?.take(BYTES_MAX).read_to_end(&mut content)?;
    Ok(content)
}

fn unreadable() -> ApiError {
    ApiError::new(
        StatusCode::SERVICE_UNAVAILABLE,
        "The folder of reports cannot be read; the operator should look at --reports-dir and its permissions.",
    )
}

fn unknown(name: &str) -> ApiError {
    let name = short(name);
    ApiError::not_found(
        "report_not_found",
        format!("There is no report `{name}`. See GET /admin/reports."),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_and_folders_with_a_report_are_listed_and_links_are_not() {
        let dir = tempfile::tempdir().expect("a folder");
        let at = |path: &str| dir.path().join(path);
        std::fs::create_dir_all(at("reports/first")).expect("made");
        std::fs::create_dir_all(at("reports/empty")).expect("made");
        std::fs::write(at("secret.html"), "secret").expect("written");
        std::fs::write(at("reports/first").join(FILE), "<p>first").expect("written");
        std::fs::write(at("reports/second.html"), "<p>second").expect("written");
        std::fs::write(at("reports/notes.txt"), "no report").expect("written");
        std::os::unix::fs::symlink(at("secret.html"), at("reports/linked.html")).expect("linked");
        std::os::unix::fs::symlink(dir.path(), at("reports/up")).expect("linked");
        let found = entries(&at("reports")).expect("listed");
        let mut names: Vec<&str> = found.iter().map(|entry| entry.name.as_str()).collect();
        names.sort_unstable();
        assert_eq!(names, ["first", "second"]);
        let first = found.iter().find(|entry| entry.name == "first").expect("there");
        assert_eq!(content(&first.path).expect("read"), b"<p>first");
        assert!(entries(&at("none")).is_err());
    }
}
