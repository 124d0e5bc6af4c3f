//! Files that a running process reads again: the keys of clients and its own certificate.

use std::cell::RefCell;
use std::path::{Path, PathBuf};

use coordinator::keys::file::KeyFile;
use identity::{Authority, CertifiedProcess, Identity, PeerRole, Renewed as _, TlsConfig, in_days};

use crate::choices::Choices;
use crate::folder::Folder;

thread_local! {
    static KEYS: Folder = Folder::new();
    static CERTIFICATES: RefCell<Option<Certificates>> = const { RefCell::new(None) };
}

/// A file of keys that is taken can be written, and is the same when it is read again.
pub(crate) fn api_keys(data: &[u8]) {
    KEYS.with(|folder| {
        let file = folder.write("keys.toml", data);
        match KeyFile::load(&file) {
            Ok(keys) => {
                keys.save(&file).expect("what was read can be written");
                let again = KeyFile::load(&file).expect("what was written can be read");
                assert_eq!(text_of(&again), text_of(&keys));
            }
            Err(error) => assert!(error.to_string().len() < 1_000, "{error}"),
        }
    });
}

fn text_of(keys: &KeyFile) -> String {
    serde_json::to_string(keys).expect("keys are plain data")
}

/// A sound set of files, one of which is replaced.
struct Certificates {
    folder: Folder,
    paths: [PathBuf; 3],
    sound: [Vec<u8>; 3],
}

impl Certificates {
    fn new() -> Self {
        let folder = Folder::new();
        let authority = Authority::create(&folder.path().join("authority"), "demo").expect("an authority");
        let process: CertifiedProcess = "decode/decode-0".parse().expect("a process");
        let files = authority.issue(&process, in_days(3650)).expect("a certificate");
        let paths = [files.certificate, files.key, authority.certificate()];
        let sound = paths.each_ref().map(|path| read(path));
        Self { folder, paths, sound }
    }
}

fn read(path: &Path) -> Vec<u8> {
    std::fs::read(path).expect("a file that was just written")
}

/// The first byte says which of the three files the others are.
pub(crate) fn certificates(data: &[u8]) {
    CERTIFICATES.with_borrow_mut(|made| {
        let made = made.get_or_insert_with(Certificates::new);
        let mut choices = Choices::of(data);
        let which = choices.below(3);
        let paths = made
            .paths
            .each_ref()
            .map(|path| path.file_name().unwrap_or_default().to_string_lossy().into_owned());
        let mut files = [0, 1, 2].map(|place| made.folder.write(&paths[place], &made.sound[place]));
        files[which] = made.folder.write("replaced.pem", choices.rest());
        let [cert, key, ca] = files;
        let config = TlsConfig {
            tls_cert: Some(cert),
            tls_key: Some(key),
            tls_ca: Some(ca),
            insecure: false,
        };
        match Identity::open(&config, PeerRole::Decode, "decode-0") {
            Ok(identity) => {
                assert!(identity.is_on() && identity.certificate().is_some());
                assert!(identity.names().iter().any(|name| name.name == "decode-0"));
                let _ = identity.read_again();
            }
            Err(error) => assert!(error.to_string().len() < 2_000, "{error}"),
        }
    });
}
