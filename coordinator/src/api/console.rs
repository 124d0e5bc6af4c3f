//! `/ui`: the files of the web console, embedded in the binary. They read only the public pages of this server.

use axum::extract::Path;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use include_dir::{Dir, include_dir};
use sha2::{Digest as _, Sha256};

use super::error::{ApiError, short};

static FILES: Dir<'static> = include_dir!("$CARGO_MANIFEST_DIR/console");

/// The policy forbids inline scripts and scripts from elsewhere, so text that a client chose and the console shows cannot
/// become a script.
const POLICY: &str = "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";
const INDEX: &str = "index.html";

pub async fn index(headers: HeaderMap) -> Response {
    serve(INDEX, &headers)
}

pub async fn file(Path(path): Path<String>, headers: HeaderMap) -> Response {
    serve(&path, &headers)
}

fn serve(path: &str, headers: &HeaderMap) -> Response {
    match FILES.get_file(path) {
        Some(file) => answer(path, file.contents(), headers),
        None => {
            let path = short(path);
            let message = format!("The console has no file `{path}`; it begins at /ui/.");
            ApiError::new(StatusCode::NOT_FOUND, message).into_response()
        }
    }
}

fn answer(path: &str, content: &'static [u8], headers: &HeaderMap) -> Response {
    let hash = Sha256::digest(content);
    let tag: String = hash[..16].iter().map(|byte| format!("{byte:02x}")).collect();
    let tag = format!("\"{tag}\"");
    let is_known = headers
        .get(header::IF_NONE_MATCH)
        .is_some_and(|known| known.as_bytes() == tag.as_bytes());
    let mut response = match is_known {
        true => StatusCode::NOT_MODIFIED.into_response(),
        false => content.into_response(),
    };
    let fixed = [
        (header::CONTENT_TYPE, content_type(path)),
        // The browser asks each time, and its cache answers while the binary is the same.
        (header::CACHE_CONTROL, "no-cache"),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
    ];
    for (name, value) in fixed {
        response.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    if let Ok(tag) = HeaderValue::from_str(&tag) {
        response.headers_mut().insert(header::ETAG, tag);
    }
    response
}

/// The content type of each kind of file that the console has.
fn content_type(path: &str) -> &'static str {
    match path.rsplit_once('.').map_or("", |(_, extension)| extension) {
        "html" => "text/html; charset=utf-8",
        "css" => "text/css; charset=utf-8",
        "js" => "text/javascript; charset=utf-8",
        "svg" => "image/svg+xml",
        "png" => "image/png",
        _ => "application/octet-stream",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_file_has_a_type_of_its_own_and_is_not_sent_twice() {
        let mut folders = vec![&FILES];
        let mut count = 0;
        while let Some(folder) = folders.pop() {
            folders.extend(folder.dirs());
            for file in folder.files() {
                let path = file.path().display().to_string();
                assert_ne!(content_type(&path), "application/octet-stream", "{path}");
                count += 1;
            }
        }
        assert!(count > 20, "only {count} files");
        let first = serve(INDEX, &HeaderMap::new());
        assert_eq!(first.status(), StatusCode::OK);
        let mut known = HeaderMap::new();
        known.insert(header::IF_NONE_MATCH, first.headers()[header::ETAG].clone());
        assert_eq!(serve(INDEX, &known).status(), StatusCode::NOT_MODIFIED);
        assert_eq!(serve("../Cargo.toml", &known).status(), StatusCode::NOT_FOUND);
    }
}
