//! Writes the files of the compression benchmarks' corpus to a folder: `write_corpus FOLDER`. With `FOREBAY_CORPUS`, those of
//! that folder.

use std::path::Path;

use forebay_peers::corpus::Corpus;

fn main() -> std::io::Result<()> {
    let folder = std::env::args().nth(1).expect("write_corpus FOLDER");
    std::fs::create_dir_all(&folder)?;
    let corpus = Corpus::from_environment()?;
    for (number, file) in corpus.blocks(usize::MAX).into_iter().enumerate() {
        std::fs::write(Path::new(&folder).join(format!("{number:02}")), file)?;
    }
    Ok(())
}
