//! Data to compress: a folder of files (the Calgary corpus, say), or a mixture every Debian machine can make.

use std::path::Path;

/// Bytes of each kind in the mixture.
const KIND: usize = 512 << 10;

/// Whole files, by name.
pub struct Corpus {
    /// Source of the data.
    pub name: String,
    files: Vec<Vec<u8>>,
}

impl Corpus {
    /// Returns the files of the folder that `FOREBAY_CORPUS` names, or else the mixture.
    ///
    /// # Errors
    /// Those of [`folder`](Self::folder).
    pub fn from_environment() -> std::io::Result<Self> {
        match std::env::var_os("FOREBAY_CORPUS") {
            Some(folder) => Self::folder(folder.as_ref()),
            None => Ok(Self::mixture()),
        }
    }

    /// The files of a folder.
    ///
    /// # Errors
    /// It cannot be read, or has none.
    pub fn folder(path: &Path) -> std::io::Result<Self> {
        let mut paths: Vec<_> =
            std::fs::read_dir(path)?.map(|entry| entry.map(|entry| entry.path())).collect::<Result<_, _>>()?;
        paths.sort();
        let files: Vec<_> = paths.iter().filter(|path| path.is_file()).map(std::fs::read).collect::<Result<_, _>>()?;
        assert!(!files.is_empty(), "no files in {}", path.display());
        let name = path.file_name().map_or_else(|| "folder".into(), |name| name.to_string_lossy().into_owned());
        Ok(Self { name, files })
    }

    /// Half a MiB each of: licence texts, our own source, a program, the package database, JSON records, pages of a
    /// database, and a bitmap.  The first four are what this machine has, so its figures go with the machine's.
    pub fn mixture() -> Self {
        let read = |paths: &[&str]| {
            let mut all = Vec::new();
            for path in paths {
                let Ok(data) = std::fs::read(path) else { continue };
                all.extend(data);
            }
            all
        };
        let licences =
            ["GPL-2", "GPL-3", "LGPL-2.1", "LGPL-3", "Apache-2.0", "MPL-1.1", "MPL-2.0", "GFDL-1.3", "Artistic"]
                .map(|name| format!("/usr/share/common-licenses/{name}"));
        let licences: Vec<&str> = licences.iter().map(String::as_str).collect();
        let program = std::env::current_exe().and_then(std::fs::read).unwrap_or_default();
        let files = vec![
            read(&licences),
            source(Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../base"))),
            program,
            read(&["/var/lib/dpkg/status"]),
            records(),
            pages(),
            bitmap(),
        ];
        let files = files.into_iter().filter(|file| !file.is_empty());
        let files = files.map(|mut file| {
            file.truncate(KIND);
            file
        });
        Self { name: "mixture".into(), files: files.collect() }
    }

    /// All of it in blocks, none of which has bytes of two files.
    pub fn blocks(&self, size: usize) -> Vec<&[u8]> {
        self.files.iter().flat_map(|file| file.chunks(size)).collect()
    }
}

/// Rust source, file after file, in the order of their names.
fn source(folder: &Path) -> Vec<u8> {
    let mut paths = Vec::new();
    let mut folders = vec![folder.to_path_buf()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
            let path = entry.path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|kind| kind == "rs") {
                paths.push(path);
            }
        }
    }
    paths.sort();
    paths.iter().filter_map(|path| std::fs::read(path).ok()).flatten().collect()
}

struct Chance(u64);

impl Chance {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    fn below(&mut self, bound: u64) -> u64 {
        (self.next() >> 33) % bound
    }
}

/// Lines of JSON, as a service writes them.
fn records() -> Vec<u8> {
    let mut chance = Chance(11);
    let mut out = String::new();
    let (verbs, states) = (["GET", "PUT", "POST", "DELETE"], ["ok", "ok", "ok", "retry", "error"]);
    let mut time = 1_700_000_000_000u64;
    while out.len() < KIND {
        time += chance.below(900);
        out.push_str(&format!(
            "{{\"time\":{time},\"id\":\"{:016x}\",\"verb\":\"{}\",\"path\":\"/volumes/{}/blocks/{}\",\"state\":\"{}\",\"micros\":{},\"bytes\":{}}}\n",
            chance.next(),
            verbs[chance.below(4) as usize],
            chance.below(40),
            chance.below(1_000_000),
            states[chance.below(5) as usize],
            50 + chance.below(400) * chance.below(20),
            4096 << chance.below(6),
        ));
    }
    out.into_bytes()
}

/// Pages of 8 KiB of a table: a header, an index of offsets, rows from the end, and zeroes between.
fn pages() -> Vec<u8> {
    let mut chance = Chance(13);
    let names = ["amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heath", "inlet", "jetty"];
    let mut out = Vec::new();
    let mut key = 1_000u64;
    while out.len() < KIND {
        let mut page = vec![0u8; 8192];
        page[..8].copy_from_slice(&(out.len() as u64 * 31).to_le_bytes());
        let (mut slot, mut end) = (24, 8192);
        loop {
            key += 1 + chance.below(3);
            let mut row = Vec::new();
            row.extend_from_slice(&key.to_be_bytes());
            row.extend_from_slice(&(chance.below(50_000) as u32).to_le_bytes());
            row.extend_from_slice(&(1_600_000_000u32 + chance.below(100_000_000) as u32).to_le_bytes());
            for _ in 0..1 + chance.below(4) {
                row.extend_from_slice(names[chance.below(10) as usize].as_bytes());
                row.push(b' ');
            }
            row.extend_from_slice(&f64::from(chance.below(100_000) as u32).to_le_bytes());
            if end - row.len() < slot + 2 + 800 {
                break;
            }
            end -= row.len();
            page[end..end + row.len()].copy_from_slice(&row);
            page[slot..slot + 2].copy_from_slice(&(end as u16).to_le_bytes());
            slot += 2;
        }
        out.extend(page);
    }
    out
}

/// A scanned page: long runs of white, edges that wander.
fn bitmap() -> Vec<u8> {
    let mut chance = Chance(17);
    let mut out = vec![0u8; KIND];
    let width = 216;
    let mut edges = [20u64, 60, 110, 170];
    for (line, row) in out.chunks_mut(width).enumerate() {
        if line / 40 % 3 == 2 {
            continue;
        }
        for edge in &mut edges {
            *edge = edge.saturating_add(chance.below(3)).saturating_sub(1).clamp(4, width as u64 - 12);
            let at = *edge as usize;
            row.iter_mut().skip(at).take(6).for_each(|byte| *byte = 0xFF);
            if let Some(byte) = row.get_mut(at + 6) {
                *byte = 0xFFu8 << chance.below(8);
            }
        }
    }
    out
}
